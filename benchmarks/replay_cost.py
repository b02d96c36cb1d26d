"""What the cache costs a whole replay of the example conversations with the tiny transformer.

    python benchmarks/replay_cost.py [--runs 5] [--requests 24] [--quick] [--json FILE]

Three ways to serve the same requests, in turn, with the same decoded tokens:

on      prefix caching on, our cache
ideal   prefix caching on, and a cache that costs nothing: it has the calls of ours and hands over,
        by reference, the outputs that ours delivered in an earlier run of the same schedule
off     prefix caching off; every output still passes through our cache (one run)

*on* and *ideal* run the same engine steps (a schedule does not depend on time; the number of steps
is compared), so what they differ by is the cost of the cache, whatever the engine itself takes.
A recorded run and a warm round come first; outputs are dropped as they leave. Wall time is that of
the pipeline's `run`, CPU time that of all threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from measuring import machine
from slotmirror import (
    DeviceBackend,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
    StageOutputs,
    StepEvents,
)
from slotmirror.engine import stage
from slotmirror.engine.pipeline import Pipeline
from slotmirror.engine.pipeline_types import PipelineOutput, PipelineRequest, PipelineResult
from slotmirror.engine.replay_options import ReplayOptions
from slotmirror.engine.traces import read_requests
from tables import markdown_table

CONVERSATIONS = Path(__file__).parent.parent / "examples" / "conversations.jsonl"
REQUESTS = 24
QUICK = (2, 8)
OPTIONS = ReplayOptions(backend="cpu_ref")


@dataclass(frozen=True)
class Record:
    """What one stage's cache delivered: step id → outputs, and the ids in order of the saves."""

    outputs: dict[int, StageOutputs]
    saved: list[int]


class Recording(PrefixCacheManager):
    """Ours, which remembers what it delivers."""

    records: list[Record] = []

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        super().__init__(config, backend)
        self._record = Record({}, [])
        self.records.append(self._record)

    def save_outputs(self, *arguments: Any, **settings: Any) -> int:
        step_id = super().save_outputs(*arguments, **settings)
        self._record.saved.append(step_id)
        return step_id

    def materialize(
        self, step_id: int, req_ids: Sequence[str] | None = None, *, device: bool = False
    ) -> StageOutputs:
        outputs = super().materialize(step_id, req_ids, device=device)
        self._record.outputs[step_id] = outputs
        return outputs


class Ideal:
    """The calls that a stage makes, for nothing: no tables, no copies, no threads, no waits."""

    records: Iterator[Record] = iter(())

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        record = next(self.records)
        self._outputs = record.outputs
        self._saved = iter(record.saved)
        self._num_saved = 0

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Nothing to keep."""

    def new_step_starts(self, events: StepEvents) -> None:
        """Nothing to do."""

    def save_outputs(self, hidden: torch.Tensor, mm: Mapping[str, object], **facts: object) -> int:
        """The id that this step had in the recorded run."""
        self._num_saved += 1
        return next(self._saved)

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> StageOutputs:
        """The recorded outputs themselves."""
        return self._outputs[step_id]

    def discard_step(self, step_id: int) -> None:
        """Nothing to give back."""

    def quiesce(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def stats(self) -> dict[str, object]:
        """Steps, to compare with the recorded run's."""
        return {"steps_saved": self._num_saved}

    def memory_stats(self) -> dict[str, int]:
        """None held."""
        return {}

    def shutdown(self) -> None:
        """Nothing to end."""


class Timed(PrefixCacheManager):
    """Ours, which counts the engine thread's seconds in its two calls."""

    seconds = 0.0

    def new_step_starts(self, events: StepEvents) -> None:
        start = time.perf_counter()
        super().new_step_starts(events)
        Timed.seconds += time.perf_counter() - start

    def save_outputs(self, *arguments: Any, **settings: Any) -> int:
        start = time.perf_counter()
        step_id = super().save_outputs(*arguments, **settings)
        Timed.seconds += time.perf_counter() - start
        return step_id


CACHES = {"on": Timed, "ideal": Ideal, "off": PrefixCacheManager}


@dataclass(frozen=True)
class Run:
    """One replay: seconds, those of the engine thread in our cache's two calls, steps per stage."""

    wall_s: float
    cpu_s: float
    calls_s: float
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Medians over the runs; costs are shares of the ideal run.

    cost_wall, cost_cpu  the median of what neighbouring runs differ by
    calls_wall           the engine thread's time in the cache's two calls, without any difference
    """

    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    steps: int
    cost_wall: float
    cost_cpu: float
    calls_wall: float
    runs: int


@contextmanager
def stage_cache(cache: type) -> Iterator[None]:
    """Stages made meanwhile use this cache."""
    kept = stage.PrefixCacheManager
    stage.PrefixCacheManager = cache  # type: ignore[misc]
    try:
        yield
    finally:
        stage.PrefixCacheManager = kept  # type: ignore[misc]


class Replays:
    """Serves the same requests again and again."""

    def __init__(self, num_requests: int) -> None:
        self._config = OPTIONS.pipeline_config("cpu_ref")
        self._requests = [
            PipelineRequest(r.request_id, r.prompt_token_ids, r.output_tokens_max, after=r.after)
            for r in read_requests(CONVERSATIONS, OPTIONS.read)
        ]
        self._requests = _closed(self._requests[:num_requests])
        Recording.records = []
        with stage_cache(Recording):
            self._tokens = self._serve(caching=True).outputs
        self._records = list(Recording.records)

    def run(self, which: str) -> Run:
        """One replay, `on`, `ideal` or `off`."""
        Ideal.records = iter(self._records)
        gc.collect()
        Timed.seconds = 0.0
        with stage_cache(CACHES[which]):
            cpu = time.process_time()
            result = self._serve(caching=which != "off", drop=_drop)
            cpu = time.process_time() - cpu
        steps = tuple(int(str(s.cache_stats["steps_saved"])) for s in result.stages.values())
        if which != "off" and steps != tuple(len(record.saved) for record in self._records):
            raise SystemExit(f"{which} ran {steps} steps: not the schedule that was recorded")
        return Run(result.wall_seconds, cpu, Timed.seconds, steps)

    def _serve(
        self, *, caching: bool, drop: Callable[[PipelineOutput], None] | None = None
    ) -> PipelineResult:
        config = self._config if caching else self._config.caching_off()
        forced = None if drop is None else self._tokens
        with Pipeline(config) as pipeline:
            return pipeline.run(self._requests, on_output=drop, forced=forced)


def _drop(output: PipelineOutput) -> None:
    """Outputs are not kept."""


def _closed(requests: list[PipelineRequest]) -> list[PipelineRequest]:
    """Without those that wait for a request that was cut off."""
    names = {request.req_id for request in requests}
    return [r for r in requests if r.after is None or r.after in names]


def measure(runs: int, num_requests: int) -> Cost:
    """All three in turn, after one warm round."""
    replays = Replays(num_requests)
    found: dict[str, list[Run]] = defaultdict(list)
    for number in range(runs + 1):
        # Who goes first changes, so that a machine that slows down slows all.
        order = ("on", "ideal") if number % 2 else ("ideal", "on")
        for which in (*order, "off") if number == 1 else order:
            run = replays.run(which)
            if number:
                found[which].append(run)

    def cost(field: str) -> float:
        """The cache's share: what `on` takes longer than `ideal`, over `ideal`."""
        pairs = zip(found["on"], found["ideal"], strict=True)
        ratios = [getattr(on, field) / getattr(ideal, field) for on, ideal in pairs]
        return statistics.median(ratios) - 1.0

    def medians(field: str) -> dict[str, float]:
        return {w: statistics.median(getattr(r, field) for r in rs) for w, rs in found.items()}

    calls_s = statistics.median(run.calls_s for run in found["on"])
    return Cost(
        medians("wall_s"),
        medians("cpu_s"),
        sum(found["on"][0].steps),
        cost("wall_s"),
        cost("cpu_s"),
        calls_s / medians("wall_s")["ideal"],
        runs,
    )


def markdown(cost: Cost) -> str:
    """The table, and the cost in a sentence."""
    table = markdown_table(
        ("cache", "wall s", "CPU s"),
        [
            (which, f"{cost.wall_s[which]:.2f}", f"{cost.cpu_s[which]:.2f}")
            for which in ("on", "ideal", "off")
        ],
    )
    saved_us = (cost.cpu_s["on"] - cost.cpu_s["ideal"]) / cost.steps * 1e6
    return (
        f"{table}\n\nCost of the cache against the ideal one: {cost.cost_wall:+.1%} wall, "
        f"{cost.cost_cpu:+.1%} CPU ({saved_us:.0f} µs CPU per step of all threads, {cost.steps} "
        f"steps). The engine thread is in the cache's calls for {cost.calls_wall:.1%} of the time."
    )


def main() -> None:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="What the cache costs a replay.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="the first so many")
    parser.add_argument("--quick", action="store_true", help="2 runs of 8 requests")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cost = measure(*(QUICK if args.quick else (args.runs, args.requests)))
    print(markdown(cost))
    if args.json:
        figures = {"machine": machine(), **asdict(cost)}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
