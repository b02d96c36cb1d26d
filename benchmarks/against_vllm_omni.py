"""Ours beside the published vllm-omni cache: the same events and tensors, in one run.

    python benchmarks/against_vllm_omni.py [--quick] [--json FILE]

Both caches are warm and take turns step by step. Reported are medians: time on the engine thread
(`new_step_starts` + `save_outputs`), and CPU time of the whole process per step, the builder's
`materialize` and our mover included. Before anything is timed, the outputs of both are compared
byte for byte. On a machine without CUDA the peer does its copies and pool writes inside its calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from peers.ours import Ours
from peers.vllm_omni import Peer
from workloads import BLOCK_SIZE, Step, decode, hits, prefill

Cache = Ours | Peer


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    name: str
    num_blocks: int
    capacity_tokens: int
    steps: Callable[[], Iterator[Step]]
    warm_steps: int


@dataclass(frozen=True)
class Result:
    """Medians, in microseconds."""

    case: str
    steps: int
    peer_engine_us: float
    ours_engine_us: float
    peer_cpu_us: float
    ours_cpu_us: float

    @property
    def engine_ratio(self) -> float:
        """Engine-thread time, peer ÷ ours."""
        return self.peer_engine_us / self.ours_engine_us

    @property
    def cpu_ratio(self) -> float:
        """CPU time of all threads, peer ÷ ours."""
        return self.peer_cpu_us / self.ours_cpu_us


def serve(cache: Cache, step: Step) -> tuple[float, float, object, object]:
    """One step of one cache: seconds on the engine thread, CPU seconds, and the outputs."""
    cache.prepare(step)
    cpu = time.process_time()
    started = time.perf_counter()
    cache.start()
    step_id = cache.save(step)
    engine_s = time.perf_counter() - started
    hidden, mm = cache.materialize(step_id, step)
    cache.settle()
    return engine_s, time.process_time() - cpu, hidden, mm


def check_equal(step: Step, ours: tuple[object, object], peer: tuple[object, object]) -> None:
    """Raise unless both caches delivered the same bytes."""
    for req_id in step.req_ids:
        pairs = [(ours[0][req_id], peer[0][req_id])]  # type: ignore[index]
        pairs += [(ours[1][key][req_id], peer[1][key][req_id]) for key in step.mm]  # type: ignore[index]
        for mine, theirs in pairs:
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                raise SystemExit(f"the caches disagree about {req_id}")


def measure(case: Case) -> Result:
    """Run one case: both caches in turn, step by step."""
    ours = Ours(case.num_blocks, BLOCK_SIZE, case.capacity_tokens, None)
    peer = Peer(case.num_blocks, BLOCK_SIZE, case.capacity_tokens, None)
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    try:
        for number, step in enumerate(case.steps()):
            mine = serve(ours, step)
            theirs = serve(peer, step)
            if number < case.warm_steps:
                check_equal(step, mine[2:], theirs[2:])
                continue
            times["ours"].append(mine[:2])
            times["peer"].append(theirs[:2])
    finally:
        ours.close()
        peer.close()

    def median_us(who: str, which: int) -> float:
        return statistics.median(entry[which] for entry in times[who]) * 1e6

    return Result(
        case.name,
        len(times["ours"]),
        median_us("peer", 0),
        median_us("ours", 0),
        median_us("peer", 1),
        median_us("ours", 1),
    )


def cases(quick: bool) -> list[Case]:
    """The measured cases; fewer and shorter ones with `quick`."""
    found = []
    for requests, keys in ((1, 1), (16, 1), (64, 1), (256, 1), (256, 3), (1024, 1)):
        steps = 12 if quick else (40 if requests >= 256 else 120)
        found.append(
            Case(
                f"decode, {requests} requests, {keys} key(s)",
                requests * 16,
                max(requests, 64),
                lambda r=requests, k=keys, s=steps: decode(r, k, s),  # type: ignore[misc]
                warm_steps=6,
            )
        )
    long_steps = 6 if quick else 15
    found += [
        Case(
            f"prefill, {tokens} tokens",
            tokens // BLOCK_SIZE,
            tokens,
            lambda t=tokens: prefill(t, 1, long_steps),  # type: ignore[misc]
            warm_steps=3,
        )
        for tokens in (512, 2048, 8192, 16384)
    ]
    found += [
        Case(
            f"hit, {tokens} tokens",
            tokens // BLOCK_SIZE + 8,
            tokens,
            lambda t=tokens: hits(t, 1, long_steps),  # type: ignore[misc]
            warm_steps=3,
        )
        for tokens in (1024, 8192, 32768)
    ]
    return found


def markdown(results: list[Result]) -> str:
    """The table of results."""
    who = "peer µs | ours µs | peer ÷ ours"
    lines = [
        f"| case | steps | engine thread, {who} | CPU of all threads, {who} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.case} | {r.steps} | {r.peer_engine_us:,.0f} | {r.ours_engine_us:,.0f} | "
        f"{r.engine_ratio:.1f} | {r.peer_cpu_us:,.0f} | {r.ours_cpu_us:,.0f} | {r.cpu_ratio:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure every case, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Ours beside the published vllm-omni cache.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for case in cases(args.quick):
        results.append(measure(case))
        print(markdown(results[-1:]).splitlines()[-1], flush=True)
    print()
    print(markdown(results))
    if args.json:
        facts = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "torch_threads": args.threads,
            "peer": Peer.name,
            "results": [asdict(result) for result in results],
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
