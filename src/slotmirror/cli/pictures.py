"""Where the time and the memory went, as bars of one scale each."""

from collections.abc import Mapping

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from slotmirror.cli.units import mb, seconds, spoken
from slotmirror.engine.pipeline_types import STAGES
from slotmirror.engine.replay_report import ReplayReport, Run, host_bytes

_BAR_WIDTH = 40


def show_time(console: Console, report: ReplayReport) -> None:
    """Bars of serving time by stage, of each run; then how many times faster caching is."""
    runs = {"with caching": report.with_caching}
    if report.without_caching is not None:
        runs["without caching"] = report.without_caching
    longest = max(run.serving_seconds for run in runs.values())
    table = _bars("where the time went")
    for label, run in runs.items():
        _row(table, label, seconds(run.serving_seconds), run.serving_seconds / longest)
        for part, duration_s in _parts(run).items():
            _row(table, f"  {part}", seconds(duration_s), duration_s / longest)
    console.print(table)
    if report.speedup is not None:
        console.print(f"caching makes it {report.speedup:.2f} times as fast")


def show_memory(console: Console, report: ReplayReport) -> None:
    """Bars of the host memory that the stage-output caches held, by stage and class."""
    sizes = {
        f"{name} {spoken(memory_class)}": num_bytes
        for name in STAGES
        for memory_class, num_bytes in host_bytes(report.with_caching.stages[name]).items()
        if num_bytes
    }
    largest = max(sizes.values())
    table = _bars("where the host memory went")
    for label, num_bytes in sizes.items():
        _row(table, label, mb(num_bytes), num_bytes / largest)
    console.print(table)


def _parts(run: Run) -> Mapping[str, float]:
    """Seconds of the stages' steps, and what is left of the run: outputs, hand-over, waiting."""
    parts = {f"{name} steps": run.stages[name].engine_seconds for name in STAGES}
    return {**parts, "the rest": max(run.serving_seconds - sum(parts.values()), 0.0)}


def _bars(title: str) -> Table:
    table = Table(title=title, box=None, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(width=_BAR_WIDTH)
    return table


def _row(table: Table, label: str, value: str, share: float) -> None:
    table.add_row(label, value, Bar(size=1.0, begin=0.0, end=share, width=_BAR_WIDTH, color="cyan"))
