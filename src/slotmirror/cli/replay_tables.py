"""What `slotmirror replay` shows when it is done."""

from collections.abc import Callable
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slotmirror.cli.pictures import show_memory, show_time
from slotmirror.cli.units import count, mb, percent, seconds, spoken
from slotmirror.engine.pipeline_types import STAGES, StageReport
from slotmirror.engine.replay_report import (
    ReplayReport,
    Run,
    hit_rate,
    host_bytes,
    prefill_tokens_saved,
    rows_gathered,
    rows_written,
)


def show_replay(console: Console, report: ReplayReport) -> None:
    """Print the table of both stages, the picture, and the verdict."""
    options = report.options
    headline = (
        f"{report.path.name} ({report.format}): {options.model} on {report.backend}, "
        f"{count(options.num_blocks)} blocks of {options.block_size}"
    )
    console.print(Text(headline, "bold"))
    console.print(_stage_table(report))
    show_time(console, report)
    show_memory(console, report)
    _show_verdict(console, report)


def _stage_table(report: ReplayReport) -> Table:
    table = Table()
    table.add_column("")
    for name in STAGES:
        table.add_column(name, justify="right")

    def row(what: str, cell: Callable[[StageReport], str], run: Run = report.with_caching) -> None:
        table.add_row(what, *(cell(run.stages[name]) for name in STAGES))

    row("requests", lambda stage: count(stage.requests))
    row("prompt tokens", lambda stage: count(stage.prompt_tokens))
    row("hit tokens", lambda stage: count(stage.hit_tokens))
    row("hit rate", lambda stage: percent(hit_rate(stage)))
    row("prefill tokens saved", lambda stage: count(prefill_tokens_saved(stage)))
    row("prefill tokens computed", lambda stage: count(stage.prefill_tokens_computed))
    row("decoded tokens", lambda stage: count(stage.decode_tokens))
    row("preemptions", lambda stage: count(stage.preemptions))
    row("steps", lambda stage: count(stage.steps))
    table.add_section()
    row("rows written", lambda stage: count(rows_written(stage)))
    row("rows gathered", lambda stage: count(rows_gathered(stage)))
    for name in host_bytes(report.with_caching.stages[STAGES[0]]):
        row(f"host memory, {spoken(name)}", partial(_memory, name))
    table.add_section()
    row("time in steps", lambda stage: seconds(stage.engine_seconds))
    if report.without_caching is not None:
        row("with caching off", lambda stage: seconds(stage.engine_seconds), report.without_caching)
    return table


def _show_verdict(console: Console, report: ReplayReport) -> None:
    verified = report.verified
    if verified is None:
        console.print("outputs not verified (--no-verify)", style="yellow")
        return
    style = "green" if report.ok else "bold red"
    console.print(
        f"outputs verified: {count(verified.requests)} of {count(report.requests)} requests, "
        f"{count(verified.rows_verified)} rows; mismatches: {count(verified.mismatches)}",
        style=style,
    )
    for mismatch in verified.first_mismatches:
        console.print(f"  {mismatch}", markup=False)


def _memory(memory_class: str, stage: StageReport) -> str:
    return mb(host_bytes(stage)[memory_class])
