"""Both schedules for the talker's codes, in turn: written with every step, or when a request ends.

    python benchmarks/deferral.py [--runs 5] [--json FILE]

Replays the example conversations with the fingerprint model and prints the CPU time of the whole
process (all threads) and the talker's engine time, medians, with their ratio. The bytes delivered
are verified in every run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from slotmirror.engine.replay import replay_trace
from slotmirror.engine.replay_options import ReplayOptions

CONVERSATIONS = Path(__file__).parent.parent / "examples" / "conversations.jsonl"


def run(defer_codes: bool) -> tuple[float, float]:
    """CPU seconds of the process and engine seconds of the talker, for one verified replay."""
    options = ReplayOptions(model="fingerprint", backend="cpu_ref", defer_codes=defer_codes)
    cpu = time.process_time()
    report = replay_trace(CONVERSATIONS, options)
    cpu = time.process_time() - cpu
    if not report.ok:
        raise SystemExit("a row was wrong")
    return cpu, report.with_caching.stages["talker"].engine_seconds


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Deferred against immediate codes.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run(True)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(args.runs):
        for defer_codes, runs in found.items():
            runs.append(run(defer_codes))
    medians = {
        defer: [statistics.median(entry[i] for entry in runs) for i in (0, 1)]
        for defer, runs in found.items()
    }
    print("| codes | CPU of the process, s | talker's engine time, s |")
    print("|---|---|---|")
    for defer, name in ((False, "with every step"), (True, "when the request ends")):
        cpu, engine = medians[defer]
        print(f"| {name} | {cpu:.2f} | {engine:.3f} |")
    ratios = [medians[True][i] / medians[False][i] for i in (0, 1)]
    print(f"| deferred ÷ immediate | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    if args.json:
        result = {
            "machine": platform.platform(),
            "runs": args.runs,
            "immediate": medians[False],
            "deferred": medians[True],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
