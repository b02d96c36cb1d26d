"""The command line; see the package's text."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutation.operators import Site, sites_of
from mutation.trial import ROOT, Commands, Verdict, Workspace, commands

_UNCHANGED_S_MAX = 1200.0


def main() -> None:
    """Sample, try, report."""
    options = _options()
    sites = sites_of((ROOT / options.module).read_text())
    chosen = sites
    if options.sample is not None and options.sample < len(sites):
        chosen = random.Random(options.seed).sample(sites, options.sample)
    chosen.sort(key=lambda site: site.line)
    print(f"{options.module}: {len(chosen)} of {len(sites)} changes, seed {options.seed}")
    to_run = commands(options.tests, options.explore)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for site, verdict in _tried(Path(folder), options.module, to_run, chosen, options.jobs):
            name = verdict.noticed_by or "nobody"
            counts[name + (", did not end" if verdict.hung else "")] += 1
            if verdict.noticed_by is None:
                print(f"SURVIVES {options.module}:{site}", flush=True)
    print("noticed by " + ", ".join(f"{name}: {count}" for name, count in counts.most_common()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutation")
    parser.add_argument("--module", required=True, help="for example core/merge.py")
    parser.add_argument("--sample", type=int, help="how many changes to try; all if not given")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tried at a time")
    parser.add_argument("--tests", nargs="+", default=["tests/core"], help="what pytest runs")
    parser.add_argument("--explore", type=int, default=150, help="schedules after the tests")
    return parser.parse_args()


def _tried(
    folder: Path, module: str, to_run: Commands, sites: list[Site], jobs: int
) -> Iterator[tuple[Site, Verdict]]:
    """Each change with its verdict, in the order of the lines."""
    first = Workspace(folder / "0", module, to_run, _UNCHANGED_S_MAX)
    print(f"without a change: {first.unchanged_s():.0f} s", flush=True)
    free: SimpleQueue[Workspace] = SimpleQueue()
    free.put(first)
    for number in range(1, jobs):
        free.put(Workspace(folder / str(number), module, to_run, first.limit_s))

    def try_one(site: Site) -> Verdict:
        workspace = free.get()
        try:
            return workspace.try_change(site.source())
        finally:
            free.put(workspace)

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(sites, pool.map(try_one, sites), strict=True)


if __name__ == "__main__":
    main()
