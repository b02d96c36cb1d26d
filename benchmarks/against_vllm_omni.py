"""Ours beside the published vllm-omni cache: the same events and tensors, in one run.

    python benchmarks/against_vllm_omni.py [--quick] [--threads 1] [--json FILE]

Both caches are warm and take turns, `ROUND_STEPS` steps each: step by step, each would find the
processor's caches full of the other's data. Reported are medians: time on the engine thread
(`new_step_starts` + `save_outputs`), and CPU time of the whole process per step, the builder's
`materialize` and our mover included. Before anything is timed, the outputs of both are compared
byte for byte. On a machine without CUDA the peer does its copies and pool writes inside its calls.

Cases with late readers materialize every step four steps later, when the blocks of its requests
have long been written by others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from measuring import low_us, machine, median_us
from peers.ours import STAGING_DEPTH, Ours
from peers.vllm_omni import Peer
from tables import markdown_table
from workloads import BLOCK_SIZE, CODES_KEY, Step, decode, hits, mixed, prefill, recycling

Cache = Ours | Peer
WARM_DECODES = 34
WARM_LONG = STAGING_DEPTH + 1
ROUND_STEPS = 10


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    name: str
    num_blocks: int
    capacity_tokens: int
    steps: Callable[[], Iterator[Step]]
    warm_steps: int
    deferred: str | None = None
    lag_steps: int = 0


@dataclass(frozen=True)
class Result:
    """Medians, in microseconds; `low` is the lower decile."""

    case: str
    steps: int
    peer_engine_us: float
    ours_engine_us: float
    peer_engine_cpu_us: float
    ours_engine_cpu_us: float
    peer_cpu_us: float
    ours_cpu_us: float
    peer_engine_low_us: float
    ours_engine_low_us: float

    @property
    def engine_ratio(self) -> float:
        """Engine-thread time, peer ÷ ours."""
        return self.peer_engine_us / self.ours_engine_us

    @property
    def engine_cpu_ratio(self) -> float:
        """The same in CPU time, which a busy machine disturbs less."""
        return self.peer_engine_cpu_us / self.ours_engine_cpu_us

    @property
    def cpu_ratio(self) -> float:
        """CPU time of all threads, peer ÷ ours."""
        return self.peer_cpu_us / self.ours_cpu_us


class Reader:
    """Serves one cache step by step, and materializes each step `lag_steps` steps later."""

    def __init__(self, cache: Cache, lag_steps: int) -> None:
        self._cache = cache
        self._lag_steps = lag_steps
        self._unread: deque[tuple[int, Step]] = deque()

    def serve(self, step: Step) -> Served:
        """One step, and the outputs that are due with it."""
        cache = self._cache
        cache.prepare(step)
        cpu = time.process_time()
        engine_cpu, started = time.thread_time(), time.perf_counter()
        cache.start()
        step_id = cache.save(step)
        engine_s, engine_cpu_s = time.perf_counter() - started, time.thread_time() - engine_cpu
        self._unread.append((step_id, step))
        read, outputs = None, None
        if len(self._unread) > self._lag_steps:
            due, read = self._unread.popleft()
            outputs = cache.materialize(due, read)
        cache.settle()
        return Served(engine_s, engine_cpu_s, time.process_time() - cpu, read, outputs)


@dataclass(frozen=True)
class Served:
    """Seconds of the engine thread, wall and CPU, and CPU seconds of all threads; what was read."""

    engine_s: float
    engine_cpu_s: float
    cpu_s: float
    read: Step | None
    outputs: tuple[Any, Any] | None


def check_equal(ours: Served, peer: Served) -> None:
    """Raise unless both caches delivered the same bytes."""
    step = ours.read
    if step is None or ours.outputs is None or peer.outputs is None:
        return
    for req_id in step.req_ids:
        pairs = [(ours.outputs[0][req_id], peer.outputs[0][req_id])]
        pairs += [(ours.outputs[1][key][req_id], peer.outputs[1][key][req_id]) for key in step.mm]
        for mine, theirs in pairs:
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                raise SystemExit(f"the caches disagree about {req_id}")


def measure(case: Case) -> Result:
    """Run one case: step by step until both are warm and have proven equal, then in rounds."""
    sizes = (case.num_blocks, BLOCK_SIZE, case.capacity_tokens, case.deferred)
    ours, peer = Ours(*sizes), Peer(*sizes)
    readers = [Reader(cache, case.lag_steps) for cache in (ours, peer)]
    served: dict[str, list[Served]] = {"ours": [], "peer": []}
    steps = case.steps()
    try:
        for step in islice(steps, case.warm_steps):
            check_equal(*(reader.serve(step) for reader in readers))
        while shared := list(islice(steps, ROUND_STEPS)):
            for name, reader in zip(served, readers, strict=True):
                # Only the times are kept: outputs that live on could not be recycled.
                served[name] += [
                    replace(reader.serve(step), read=None, outputs=None) for step in shared
                ]
    finally:
        ours.close()
        peer.close()

    def medians_us(field: str) -> tuple[float, float]:
        """Of the peer, and of ours."""
        times = {who: [getattr(entry, field) for entry in served[who]] for who in served}
        return median_us(times["peer"]), median_us(times["ours"])

    return Result(
        case.name,
        len(served["ours"]),
        *medians_us("engine_s"),
        *medians_us("engine_cpu_s"),
        *medians_us("cpu_s"),
        *(low_us([entry.engine_s for entry in served[who]]) for who in ("peer", "ours")),
    )


def cases(quick: bool) -> list[Case]:
    """The measured cases; shorter ones with `quick`."""
    return [*_decodes(quick), *_prefills(quick), *_hits(quick), *_others(quick)]


def _decodes(quick: bool) -> Iterator[Case]:
    for requests, keys in product((1, 16, 64, 256, 1024), (1, 3)):
        steps = 10 if quick else (30 if requests >= 256 else 100)
        yield Case(
            f"decode, {requests} requests, {keys} key(s)",
            requests * 2,
            max(requests, 64),
            lambda r=requests, k=keys, s=WARM_DECODES + steps: decode(r, k, s),  # type: ignore[misc]
            warm_steps=WARM_DECODES,
        )


def _prefills(quick: bool) -> Iterator[Case]:
    for tokens in (512, 2048, 8192, 16384):
        yield Case(
            f"prefill, {tokens} tokens",
            tokens // BLOCK_SIZE,
            tokens,
            lambda t=tokens: prefill(t, 1, WARM_LONG + _long(quick)),  # type: ignore[misc]
            warm_steps=WARM_LONG,
        )


def _hits(quick: bool) -> Iterator[Case]:
    for tokens in (1024, 8192, 32768):
        yield Case(
            f"hit, {tokens} tokens",
            tokens // BLOCK_SIZE + 8,
            tokens,
            lambda t=tokens: hits(t, 1, 2 + _long(quick)),  # type: ignore[misc]
            warm_steps=3,
        )


def _others(quick: bool) -> Iterator[Case]:
    steps = 10 if quick else 60
    yield Case(
        "32 requests decode, a prompt in chunks of 256",
        128 + 64,
        512,
        lambda: mixed(32, WARM_DECODES + steps),
        warm_steps=WARM_DECODES,
    )
    yield Case(
        "deferred codes, 24 short requests",
        16 + 4 * 24,
        1024,
        lambda: recycling(24, WARM_DECODES + steps, codes=True),
        warm_steps=WARM_DECODES,
        deferred=CODES_KEY,
    )
    yield Case(
        "heavy recycling, 24 short requests, late readers",
        16 + 4 * 24,
        1024,
        lambda: recycling(24, WARM_DECODES + steps),
        warm_steps=WARM_DECODES,
        lag_steps=4,
    )


def _long(quick: bool) -> int:
    return 4 if quick else 10


def markdown(results: list[Result]) -> str:
    """The table of results."""
    return markdown_table(
        ("case", "steps", "engine thread: peer µs", "ours µs", "peer ÷ ours", "in CPU time",
         "all threads' CPU: peer µs", "ours µs", "peer ÷ ours"),
        [
            (
                r.case,
                r.steps,
                f"{r.peer_engine_us:,.0f}",
                f"{r.ours_engine_us:,.0f}",
                f"{r.engine_ratio:.1f}",
                f"{r.engine_cpu_ratio:.1f}",
                f"{r.peer_cpu_us:,.0f}",
                f"{r.ours_cpu_us:,.0f}",
                f"{r.cpu_ratio:.1f}",
            )
            for r in results
        ],
    )  # fmt: skip


def run(quick: bool, torch_threads: int | None) -> list[Result]:
    """Every case, printed as it is done; `None` leaves torch its own number of threads."""
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    results = []
    for case in cases(quick):
        results.append(measure(case))
        print(markdown(results[-1:]).splitlines()[-1], flush=True)
    return results


def main() -> None:
    """Measure every case, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Ours beside the published vllm-omni cache.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=None, help="torch threads")
    args = parser.parse_args()
    results = run(args.quick, args.threads)
    print()
    print(markdown(results))
    if args.json:
        facts = {
            "machine": machine(),
            "torch_threads": torch.get_num_threads(),
            "peer": Peer.name,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
