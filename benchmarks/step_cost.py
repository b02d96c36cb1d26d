"""What a decode step costs each thread, by part, at several batch sizes and row widths.

    python benchmarks/step_cost.py [--requests 16 256 1024] [--keys 1] [--steps 300] [--quick]
                                   [--committer threaded] [--json FILE] [--profile FILE.svg]

Every request decodes one token per step. Rows are 2048 bf16 values and, to see what grows beyond
the bytes, 16 (32 bytes). A builder materializes each step. Three tables:

threads    engine-thread time of the cache's two calls, the builder's and the mover's CPU time
           (read from the threads' own clocks, nothing instrumented), and how often per step the
           engine thread gave up its core to wait: a hand-off of the GIL or of a lock, a page; in
           the two calls and in the whole step, the adapter included. *Spaced* steps leave the
           other threads time to finish, *back to back* steps overlap.
growth     engine-thread time from the first batch size to the others, lower decile
parts      exclusive time of the functions in `parts.py`, in a second, instrumented run

`--profile` draws the step of median length, of the largest batch of full rows up to 256, as SVG.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from decode_batch import POSITIONS, DecodeBatch, StepTimes
from measuring import cpu_s_of, low_us, machine, median_us
from parts import Instruments, Span
from slotmirror import DeviceBackend, load_backend
from tables import markdown_table
from timeline import draw

WIDTHS = (2048, 16)
ROUNDS = 4
INSTRUMENTED_STEPS = 120
PICTURE_REQUESTS_MAX = 256


@dataclass(frozen=True)
class StepCost:
    """One batch size and row width; microseconds per step, medians unless said otherwise."""

    requests: int
    keys: int
    row_bytes: int
    spaced: bool
    adapter_us: float
    new_step_starts_us: float
    save_outputs_us: float
    engine_us: float
    engine_low_us: float
    engine_cpu_us: float
    builder_us: float
    builder_cpu_us: float
    mover_cpu_us: float
    blocked_per_step: float
    blocked_in_all_per_step: float
    preempted_per_step: float
    page_waits: int


@dataclass(frozen=True)
class PartTimes:
    """Exclusive medians of one batch size: lane → part → microseconds per step."""

    requests: int
    row_bytes: int
    timing_cost_us: float
    lanes: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    requests: tuple[int, ...]
    keys: int
    steps: int
    committer: str
    backend: DeviceBackend

    def batch(self, requests: int, width: int, *, spaced: bool) -> DecodeBatch:
        """A warm batch."""
        batch = DecodeBatch(
            requests,
            width=width,
            keys=self.keys,
            committer=self.committer,
            backend=self.backend,
            spaced=spaced,
        )
        for _ in range(POSITIONS):
            batch.step()
        batch.wait_until_idle()
        return batch


class Measurement:
    """The times of one batch, in as many rounds as wanted."""

    def __init__(self, plan: Plan, requests: int, width: int, *, spaced: bool) -> None:
        self._facts = (requests, plan.keys, width * 2, spaced)
        self._batch = plan.batch(requests, width, spaced=spaced)
        self._num_warm = len(self._batch.builds)
        self._times: list[StepTimes] = []
        self._mover_cpu_s = 0.0

    def round(self, steps: int) -> None:
        """Run and time so many steps."""
        before_s = self._movers_cpu_s()
        self._times += [self._batch.step() for _ in range(steps)]
        self._batch.wait_until_idle()
        self._mover_cpu_s += self._movers_cpu_s() - before_s

    def finish(self) -> StepCost:
        """Medians; ends the batch."""
        times, builds = self._times, self._batch.builds[self._num_warm :]
        page_waits = int(str(self._batch.cache.stats()["page_waits"]))
        self._batch.close()
        return StepCost(
            *self._facts,
            median_us([t.adapter_s for t in times]),
            median_us([t.new_step_starts_s for t in times]),
            median_us([t.save_outputs_s for t in times]),
            median_us([t.engine_s for t in times]),
            low_us([t.engine_s for t in times]),
            median_us([t.cpu_s for t in times]),
            median_us([wall for wall, _ in builds]),
            median_us([cpu for _, cpu in builds]),
            self._mover_cpu_s / len(times) * 1e6,
            statistics.mean(t.blocked for t in times),
            statistics.mean(t.blocked_in_all for t in times),
            statistics.mean(t.preempted for t in times),
            page_waits,
        )

    def _movers_cpu_s(self) -> float:
        return sum(cpu_s_of(thread) for thread in self._batch.movers)


def measure(plan: Plan, width: int, *, spaced: bool) -> list[StepCost]:
    """Every batch size without instruments; they take turns, so that a noisy minute hits all."""
    batches = [Measurement(plan, n, width, spaced=spaced) for n in plan.requests]
    for _ in range(ROUNDS):
        for batch in batches:
            batch.round(plan.steps // ROUNDS)
    return [batch.finish() for batch in batches]


def measure_parts(plan: Plan, requests: int, width: int, steps: int) -> tuple[PartTimes, str]:
    """One batch size with every part timed; also the picture of the step of median length."""
    batch = plan.batch(requests, width, spaced=True)
    lanes = {threading.get_ident(): "engine", batch.builder.ident or 0: "builder"}
    lanes |= {thread.ident or 0: "mover" for thread in batch.movers}
    found: list[list[Span]] = []
    try:
        with Instruments(type(plan.backend)) as instruments:
            for _ in range(steps):
                batch.step()
                batch.wait_until_idle()
                found.append(list(instruments.spans))
                instruments.spans.clear()
    finally:
        batch.close()
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for spans in found:
        for (thread, part), own_us in instruments.own_us(spans).items():
            samples[lanes.get(thread, "other")][part].append(own_us)
    medians = {
        lane: {part: statistics.median(values) for part, values in parts.items()}
        for lane, parts in samples.items()
    }
    cost_us = (instruments.cost.inside_s + instruments.cost.outside_s) * 1e6
    picked = sorted(found, key=lambda spans: _engine_s(spans, threading.get_ident()))[steps // 2]
    title = f"One decode step, {requests} requests, {plan.keys} key(s), rows of {width * 2} B"
    return PartTimes(requests, width * 2, cost_us, medians), draw(title, picked, lanes)


def _engine_s(spans: list[Span], engine: int) -> float:
    return sum(s.end_s - s.start_s for s in spans if s.thread == engine and s.depth == 0)


def growth(costs: list[StepCost]) -> list[tuple[int, int, float]]:
    """(row bytes, requests, engine-thread time over that of the first batch size), spaced."""
    first: dict[int, float] = {}
    found = []
    for cost in costs:
        if cost.spaced:
            base = first.setdefault(cost.row_bytes, cost.engine_low_us)
            found.append((cost.row_bytes, cost.requests, cost.engine_low_us / base))
    return found


def markdown(costs: list[StepCost], parts: list[PartTimes]) -> str:
    """The three tables."""
    threads = markdown_table(
        (
            *("requests", "row bytes", "steps", "adapter µs", "new_step_starts µs"),
            *("save_outputs µs", "engine thread µs", "its CPU µs", "builder µs", "its CPU µs"),
            *("mover CPU µs", "blocked in calls", "blocked in step", "preempted"),
        ),
        [
            (
                c.requests,
                c.row_bytes,
                "spaced" if c.spaced else "back to back",
                *(f"{us:.0f}" for us in (c.adapter_us, c.new_step_starts_us, c.save_outputs_us)),
                *(f"{us:.0f}" for us in (c.engine_us, c.engine_cpu_us)),
                *(f"{us:.0f}" for us in (c.builder_us, c.builder_cpu_us, c.mover_cpu_us)),
                f"{c.blocked_per_step:.2f}",
                f"{c.blocked_in_all_per_step:.2f}",
                f"{c.preempted_per_step:.2f}",
            )
            for c in costs
        ],
    )
    grown = markdown_table(
        ("row bytes", "requests", "engine thread, growth"),
        [(row_bytes, requests, f"{ratio:.2f}×") for row_bytes, requests, ratio in growth(costs)],
    )
    return f"{threads}\n\n{grown}\n\n{_parts_table(parts)}"


def _parts_table(parts: list[PartTimes]) -> str:
    rows = list(dict.fromkeys((lane, p) for t in parts for lane in t.lanes for p in t.lanes[lane]))
    rows.sort(key=lambda row: ("engine", "mover", "builder", "other").index(row[0]))
    return markdown_table(
        ("thread", "part", *(f"{t.requests} × {t.row_bytes} B, µs" for t in parts)),
        [
            (lane, part, *(f"{t.lanes.get(lane, {}).get(part, 0.0):.1f}" for t in parts))
            for lane, part in rows
        ],
    )


def run(plan: Plan, picture: Path | None) -> tuple[dict[str, object], str]:
    """Everything: the figures as plain values, and the tables."""
    costs, parts = [], []
    instrumented = min(plan.steps, INSTRUMENTED_STEPS)
    for width in WIDTHS:
        costs += measure(plan, width, spaced=True)
        for requests in plan.requests:
            times, svg = measure_parts(plan, requests, width, instrumented)
            parts.append(times)
            if picture and width == WIDTHS[0] and requests <= PICTURE_REQUESTS_MAX:
                picture.write_text(svg)
    costs += measure(plan, WIDTHS[0], spaced=False)
    figures = {
        "committer": plan.committer,
        "backend": plan.backend.name,
        "threads": [asdict(cost) for cost in costs],
        "growth": [
            {"row_bytes": row_bytes, "requests": requests, "ratio": ratio}
            for row_bytes, requests, ratio in growth(costs)
        ],
        "parts": [asdict(times) for times in parts],
    }
    return figures, markdown(costs, parts)


def main() -> None:
    """Measure, print the tables, write JSON and a picture where asked."""
    parser = argparse.ArgumentParser(description="What a decode step costs each thread, by part.")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="50 steps each")
    parser.add_argument("--committer", choices=["threaded", "inline"], default="threaded")
    parser.add_argument("--backend", default="cpu_ref")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--profile", type=Path, default=None, help="write a timeline, SVG")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = 50 if args.quick else args.steps
    backend = load_backend(args.backend)
    plan = Plan(tuple(args.requests), args.keys, steps, args.committer, backend)
    figures, tables = run(plan, args.profile)
    print(tables)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
