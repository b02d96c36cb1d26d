"""Every benchmark in one go, and the bars beside what was measured.

    python benchmarks/bench.py [--quick] [--only step_cost ...] [--name NAME]

Each benchmark runs in a process of its own. Prints their tables and writes `NAME.md` and
`NAME.json`, with the machine, under `benchmarks/results/`; the timeline of one decode step lies
beside them. `--quick` is for trials: too few steps to judge by, written to `quick.*`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bars
from measuring import machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LOAD_MAX = 0.7
INTRODUCTION = (
    "`python benchmarks/bench.py`. Ratios are of one run on one machine; absolute times are this "
    "machine's."
)
BUSY = (
    "**The machine was busy when this began**: wall times, and bars on them, are not to be judged "
    "by; CPU times and lower deciles suffer less."
)


@dataclass(frozen=True)
class Part:
    """One benchmark."""

    name: str
    title: str
    script: str
    arguments: tuple[str, ...] = ()
    picture: bool = False


PARTS = (
    Part("step_cost", "A decode step, by thread and part", "step_cost.py", picture=True),
    Part(
        "against_vllm_omni",
        "Beside the published vllm-omni cache, one torch thread",
        "against_vllm_omni.py",
        ("--threads", "1"),
    ),
    Part(
        "against_vllm_omni_threads",
        "The same with torch's own number of threads, few steps",
        "against_vllm_omni.py",
        ("--quick",),
    ),
    Part("against_memcpy", "Beside plain copies", "against_memcpy.py"),
    Part("long_run", "Ten thousand steps of a mixed workload", "long_run.py"),
    Part("replay_cost", "A whole replay", "replay_cost.py", ("--requests", "158", "--runs", "3")),
)


@dataclass(frozen=True)
class Outcome:
    """What one benchmark printed and wrote."""

    part: Part
    seconds: float
    printed: str
    figures: dict[str, Any]


def run(part: Part, quick: bool, picture: Path) -> Outcome:
    """Run one benchmark; raises `SystemExit` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, str(HERE / part.script), *part.arguments]
        if quick and "--quick" not in command:
            command.append("--quick")
        if part.picture:
            command += ["--profile", str(picture)]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--json", str(figures)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{part.script} failed")
        seconds = time.perf_counter() - started
        return Outcome(part, seconds, done.stdout.strip(), json.loads(figures.read_text()))


def report(
    facts: dict[str, Any], outcomes: list[Outcome], found: list[bars.Bar], picture: Path
) -> str:
    """The Markdown of all results."""
    listed = [f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items()]
    busy = facts["load_average"][0] > LOAD_MAX
    sections = [
        "# Results",
        INTRODUCTION,
        "\n".join(listed),
        *([BUSY] if busy else []),
        "## Bars",
        bars.markdown(found),
    ]
    for outcome in outcomes:
        part = outcome.part
        command = " ".join(("python", f"benchmarks/{part.script}", *part.arguments))
        sections += [f"## {part.title}", f"`{command}`, {outcome.seconds:.0f} s.", outcome.printed]
        if part.picture:
            sections.append(f"![timeline of one decode step]({picture.name})")
    return "\n\n".join(sections) + "\n"


def main() -> None:
    """Run, print, write."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description="Every benchmark, and the bars.")
    parser.add_argument("--quick", action="store_true", help="few steps, written to quick.*")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--name", default=None, help="of the files under benchmarks/results")
    args = parser.parse_args()
    name = args.name or ("quick" if args.quick else "bench")
    RESULTS.mkdir(exist_ok=True)
    picture = RESULTS / f"{name}_step.svg"
    facts = machine()
    outcomes = []
    for part in (part for part in PARTS if part.name in args.only):
        outcomes.append(run(part, args.quick, picture))
        print(f"## {part.title} ({outcomes[-1].seconds:.0f} s)\n\n{outcomes[-1].printed}\n")
        sys.stdout.flush()
    figures = {outcome.part.name: outcome.figures for outcome in outcomes}
    found = bars.bars(figures)
    print(bars.markdown(found))
    (RESULTS / f"{name}.md").write_text(report(facts, outcomes, found, picture))
    result = {
        "machine": facts,
        "bars": [{**asdict(bar), "met": bar.met} for bar in found],
        "benchmarks": figures,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
