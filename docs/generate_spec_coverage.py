"""Writes docs/spec-coverage.md: every rule of the stage-output cache, and the tests named after it.

    python docs/generate_spec_coverage.py [--check]

A test covers the rules that its name carries: `test_D6_…`, `test_T4_T5_P2_…`. With `--check`
nothing is written: exit code 1 if the page is out of date or a rule has no test.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "spec-coverage.md"

RULES = {
    "K1": "settings and their defaults; wrong values name their field",
    "K2": "sizes from the engine, every field open to the operator",
    "K3": "slots from block tables rebuilt from the scheduler's output",
    "K4": "the model's policy",
    "C1": "order within a step: ended, preempted, claim, hits",
    "C2": "slots of a step are claimed before hits are registered",
    "C3": "a step without a save leaves its slots absent; a failed save may be repeated",
    "C4": "no save without a started step",
    "D1": "a miss returns the step's rows in batch order",
    "D2": "a hit returns pool rows and this step's rows, contiguous, byte-identical",
    "D3": "shared prefixes, own tails",
    "D4": "impossible hits raise at registration",
    "D5": "absent hidden rows raise; the others keep theirs",
    "D6": "keys are independent; absent rows read zeros, never a former owner's",
    "D7": "per-token keys and leftovers",
    "D8": "a key keeps its row layout",
    "D9": "outputs may be overwritten by the next forward",
    "D10": "outputs written in sample exclude hidden rows",
    "H1": "hits on blocks computed in the same step",
    "H2": "the same on recycled blocks, and on blocks filled up in the step",
    "H3": "a planned read keeps its rows however late it is fetched",
    "H4": "the newer owner's, and the later, row stays",
    "H5": "prefetch on or off, inline or threaded: identical bytes",
    "H6": "hits on rows of the open deferred batch",
    "W1": "states of a write task",
    "W2": "immediate and deferred schedules",
    "W3": "abort still writes",
    "W4": "device bytes reserved before the clone, released once",
    "W5": "failures are sticky; a failed gather fails its step alone",
    "W6": "the mover waits without limit, callers bounded",
    "S1": "pages",
    "S2": "step ids are consumed exactly once",
    "S3": "discard, quiesce, shutdown",
    "S4": "row orders and counts are checked before anything changes",
    "L1": "continuations",
    "L2": "preempted and resumed",
    "L3": "delivered positions, replays, gaps",
    "L4": "owners are generations",
    "L5": "prompt replacement",
    "L6": "control-only steps",
    "L7": "synchronous speculative decoding",
    "G1": "stages without a cache",
    "G2": "refusals by name",
    "G3": "rows kept on one rank",
    "G4": "the error of a refusal",
    "T1": "what the engine thread may wait for",
    "T2": "builders bind their thread",
    "T3": "the mover takes no manager lock and needs no page",
    "T4": "which lock covers what",
    "T5": "no lock across a wait, a copy, an allocation or a backend call",
    "T6": "one thread claims COPYING",
    "T7": "threads start lazily",
    "R1": "reset",
    "R2": "after a sticky failure only a new manager serves",
    "M1": "memory plan and limit",
    "M2": "preallocation",
    "M3": "hit buffers bounded, output buffers recycled",
    "P1": "cost does not grow with the number of requests",
    "P2": "no lock held across a copy, a wait, an allocation or a backend call",
    "P3": "rows cross host memory as few times as possible",
    "O1": "counters",
}

_NAMED = re.compile(r"^test_((?:[A-Z]\d+_)+)")


def covering_tests() -> dict[str, list[str]]:
    """Rule → `file::test` of every test that is named after it."""
    found: dict[str, list[str]] = {rule: [] for rule in RULES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (match := _NAMED.match(node.name)):
                for rule in match.group(1).rstrip("_").split("_"):
                    if rule in found:
                        found[rule].append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def page(found: dict[str, list[str]]) -> str:
    """The page's text."""
    lines = [
        "# Rules and their tests",
        "",
        "Written by `python docs/generate_spec_coverage.py`; a test fails when it is out of date.",
        "",
        "| rule | what it says | tests |",
        "|---|---|---|",
    ]
    for rule, meaning in RULES.items():
        tests = "<br>".join(f"`{name}`" for name in found[rule])
        lines.append(f"| {rule} | {meaning} | {tests} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    found = covering_tests()
    missing = [rule for rule, tests in found.items() if not tests]
    if missing:
        print(f"rules without a test: {', '.join(missing)}", file=sys.stderr)
        return 1
    text = page(found)
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is out of date: run {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
