"""`slotmirror replay`: serve a trace, verify every output, and show what caching saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.capacity_curve import capacity_svg
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import (
    check_json_file,
    check_output_file,
    write_json,
    write_output_file,
)
from slotmirror.cli.replay_tables import show_replay
from slotmirror.cli.trace_plan_tables import show_trace_plan
from slotmirror.core.errors import ConfigError
from slotmirror.engine.planning import PlanOptions, plan_capacity, plan_trace
from slotmirror.engine.replay import ProgressListener, replay_trace
from slotmirror.engine.replay_options import DEFAULT_BLOCK_SIZE, DEFAULT_NUM_BLOCKS, ReplayOptions
from slotmirror.engine.traces import ReadOptions

EXIT_MISMATCH = 1

ModelOption: TypeAlias = Annotated[
    Literal["transformer", "fingerprint", "none"],
    typer.Option(help="Kind of model; none counts hits and runs nothing."),
]
BackendOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Device backend; chosen automatically if not given.")
]
NumBlocksOption: TypeAlias = Annotated[
    list[int] | None,
    typer.Option(
        help=f"KV blocks per stage. Default {DEFAULT_NUM_BLOCKS}; for none, endless. "
        "With none it may be repeated: hit rate against capacity."
    ),
]
CurveOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.svg",
        help="With none: draw hit rate against capacity, for these pools or for round sizes.",
    ),
]
BlockSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help=f"Slots per block. Default {DEFAULT_BLOCK_SIZE}; for none, the trace's own if it has."
    ),
]
ReserveOption: TypeAlias = Annotated[
    bool, typer.Option(help="Start a request only when its whole prompt fits; off: preempt more.")
]
DeferOption: TypeAlias = Annotated[
    bool, typer.Option(help="Write the talker's codes when their request ends, not every step.")
]
CommitterOption: TypeAlias = Annotated[
    Literal["threaded", "inline"], typer.Option(help="Where the cache moves rows.")
]
JsonOption: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
]


def replay(
    file: Annotated[Path, typer.Argument(help="Chat JSONL, or a Mooncake or Bailian trace JSONL.")],
    model: ModelOption = "transformer",
    backend: BackendOption = None,
    num_blocks: NumBlocksOption = None,
    block_size: BlockSizeOption = None,
    max_batched_tokens: Annotated[int, typer.Option(help="Tokens per step and stage.")] = 512,
    scale: Annotated[int, typer.Option(help="Divides the lengths of a block trace.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Requests to read at most.")] = None,
    output_tokens_max: Annotated[int, typer.Option(help="Tokens per reply at most.")] = 16,
    verify: Annotated[bool, typer.Option(help="Check every row of every output.")] = True,
    compare: Annotated[bool, typer.Option(help="Time the same with caching off.")] = False,
    reserve_full_sequence: ReserveOption = True,
    defer_codes: DeferOption = True,
    committer: CommitterOption = "threaded",
    capacity_curve: CurveOption = None,
    json_file: JsonOption = None,
) -> None:
    """Replay conversations or a block trace and verify every output.

    Ends with exit code 1 if a row is wrong and 2 if the input is.
    """
    console = output_console()
    with bad_input_exits():
        check_json_file(json_file)
        read = ReadOptions(scale=scale, limit=limit, output_tokens_max=output_tokens_max)
        if model == "none":
            plan_options = PlanOptions(tuple(num_blocks or ()), block_size, read)
            _plan(console, file, plan_options, capacity_curve, json_file)
            return
        options = ReplayOptions(
            model=model,
            backend=backend,
            num_blocks=_single_pool(num_blocks, capacity_curve),
            block_size=DEFAULT_BLOCK_SIZE if block_size is None else block_size,
            max_batched_tokens=max_batched_tokens,
            reserve_full_sequence=reserve_full_sequence,
            defer_codes=defer_codes,
            committer=committer,
            verify=verify,
            compare=compare,
            read=read,
        )
        with _progress_bars(console) as listener:
            report = replay_trace(file, options, listener)
        write_json(json_file, report.to_json())
    show_replay(console, report)
    if not report.ok:
        raise typer.Exit(EXIT_MISMATCH)


def _plan(
    console: Console,
    file: Path,
    options: PlanOptions,
    curve_file: Path | None,
    json_file: Path | None,
) -> None:
    check_output_file("capacity_curve", curve_file)
    plan = (plan_trace if curve_file is None else plan_capacity)(file, options)
    write_json(json_file, plan.to_json())
    if curve_file is not None:
        write_output_file("capacity_curve", curve_file, capacity_svg(file.name, plan))
    show_trace_plan(console, file, plan)


def _single_pool(num_blocks: list[int] | None, curve_file: Path | None) -> int:
    """A model runs with one pool."""
    if curve_file is not None:
        raise ConfigError("capacity_curve", str(curve_file), "needs --model none")
    if not num_blocks:
        return DEFAULT_NUM_BLOCKS
    if len(num_blocks) > 1:
        raise ConfigError("num_blocks", num_blocks, "several pools need --model none")
    return num_blocks[0]


@contextmanager
def _progress_bars(console: Console) -> Iterator[ProgressListener]:
    """One bar for every run, shown while it lasts."""
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        "requests",
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def listener(run: str, done: int, total: int) -> None:
            if run not in bars:
                bars[run] = progress.add_task(run, total=total)
            progress.update(bars[run], completed=done)

        yield listener
