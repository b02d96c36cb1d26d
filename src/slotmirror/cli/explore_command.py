"""`slotmirror explore`: search interleavings of the cache's threads for a wrong row."""

import random
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import check_json_file, write_json
from slotmirror.cli.units import count, seconds
from slotmirror.conformance.explorer.exhaustive import explore_all
from slotmirror.conformance.explorer.parallel import explore_in_pieces
from slotmirror.conformance.explorer.search import ExploreReport, Progress
from slotmirror.conformance.explorer.search import explore as search
from slotmirror.conformance.traces.scenarios import scenarios

EXIT_FOUND = 1
_FRESH_SEED_MAX = 1 << 40


def explore(
    schedules: Annotated[int, typer.Option(min=1, help="Schedules to try.")] = 1000,
    seed: Annotated[int | None, typer.Option(min=0, help="Replay this one schedule.")] = None,
    first_seed: Annotated[
        int | None, typer.Option(min=0, help="First seed; a fresh one is drawn if not given.")
    ] = None,
    faults: Annotated[bool, typer.Option(help="Let one thing fail in every run.")] = False,
    both: Annotated[
        bool, typer.Option(help="Runs with and without a fault, in turn, some hundred at a time.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many minutes.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="DEVIATIONS",
            help="Instead: every schedule of small traces with at most so many deviations.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report here too.")
    ] = None,
) -> None:
    """Explore schedules of a real manager on a simulated device.

    Every row that is delivered is compared with a plain model. Ends with exit code 1, a seed and
    the log's tail if one is wrong, a thread hangs, or anything is left at the end.
    """
    console = output_console()
    with bad_input_exits():
        check_json_file(json_file)
    if every is not None:
        _explore_small_traces(console, every)
        return
    if seed is not None:
        first_seed, schedules = seed, 1
    elif first_seed is None:
        first_seed = random.SystemRandom().randrange(_FRESH_SEED_MAX)
    console.print(f"first seed {first_seed}")
    report = _search(
        first_seed,
        schedules,
        kinds=(False, True) if both else (faults,),
        processes=processes,
        seconds_max=None if minutes is None else minutes * 60,
        progress=_Progress(console),
    )
    with bad_input_exits():
        write_json(json_file, report.to_json())
    _show(console, report)
    if report.failed_seed is not None:
        raise typer.Exit(EXIT_FOUND)


class _Progress:
    """A line every thousand schedules or so."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def __call__(self, report: ExploreReport) -> None:
        if report.schedules >= self._shown + 1000:
            self._shown = report.schedules
            rate = f"{report.schedules_per_s:.0f} per second"
            self._console.print(f"{count(report.schedules)} schedules, {rate}")


def _search(
    first_seed: int,
    schedules: int,
    *,
    kinds: tuple[bool, ...],
    processes: int,
    seconds_max: float | None,
    progress: Progress,
) -> ExploreReport:
    """Here, or in pieces where there are several processes or kinds."""
    if processes == len(kinds) == 1:
        return search(
            first_seed, schedules, faults=kinds[0], seconds_max=seconds_max, progress=progress
        )
    return explore_in_pieces(
        first_seed,
        schedules,
        kinds=kinds,
        processes=processes,
        seconds_max=seconds_max,
        progress=progress,
    )


def _show(console: Console, report: ExploreReport) -> None:
    table = Table("what happened", "times")
    rows = {
        "schedules": report.schedules,
        "distinct log orders": len(report.log_orders),
        "schedule points": report.points,
        **dict(sorted(report.counts.items())),
    }
    for name, number in rows.items():
        table.add_row(name, count(number))
    console.print(table)
    console.print(f"{seconds(report.seconds)}, {report.schedules_per_s:.0f} schedules per second")
    if report.failed_seed is None:
        console.print("nothing found", style="green")
        return
    console.print(report.failure, markup=False, style="red")
    again = f"slotmirror explore --seed {report.failed_seed}" + " --faults" * report.faults
    console.print(f"replay it: {again}", markup=False)


def _explore_small_traces(console: Console, deviations_max: int) -> None:
    for trace in scenarios().values():
        report = explore_all(trace, deviations_max)
        console.print(
            f"{trace.name}: {count(report.schedules)} schedules, "
            f"{count(report.log_orders)} log orders",
            markup=False,
        )
        if report.failed is not None:
            console.print(
                f"{report.failure}\ndeviations {report.failed}", markup=False, style="red"
            )
            raise typer.Exit(EXIT_FOUND)
    console.print("nothing found", style="green")
