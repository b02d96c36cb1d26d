"""`slotmirror golden`: recorded traces that a machine, a driver or a version must reproduce."""

from pathlib import Path
from typing import Annotated

import typer

from slotmirror.cli.bad_input import EXIT_BAD_INPUT, bad_input_exits
from slotmirror.cli.consoles import error_console, output_console
from slotmirror.cli.golden_group import FilesOrCommand
from slotmirror.cli.units import count
from slotmirror.conformance.golden.check import GoldenReport, check_backend
from slotmirror.conformance.golden.record import TRACES, record_traces
from slotmirror.engine.golden_replay import ReplayReport, VectorFileError, replay_report

EXIT_DIFFERS = 1
_SHOWN = 20

golden = typer.Typer(
    cls=FilesOrCommand,
    no_args_is_help=True,
    help="Recorded traces that a machine, a driver or a version must reproduce. "
    "`golden FILE…` is `golden replay FILE…`.",
)


@golden.command()
def check(
    backend: Annotated[
        str | None, typer.Option(help="Device backend; chosen automatically if not given.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(help="A file of `golden record`; the shipped one if not given.")
    ] = None,
) -> None:
    """Play the golden traces of the stage-output cache on a backend; exit code 1 if one differs."""
    with bad_input_exits():
        report = check_backend(backend, file)
    _show_check(report)
    if not report.ok:
        raise typer.Exit(EXIT_DIFFERS)


@golden.command()
def record(
    file: Annotated[Path, typer.Argument(help="Where to write.")],
    traces: Annotated[int, typer.Option(min=1, help="Drawn traces.")] = TRACES,
) -> None:
    """Record golden traces from the reference, each proven by the plain model first."""
    with bad_input_exits():
        recordings = record_traces(file, traces)
    output_console().print(f"{len(recordings)} traces written to {file}", markup=False)


@golden.command()
def replay(
    files: Annotated[list[Path], typer.Argument(help="Files of vectors taken from vLLM.")],
) -> None:
    """Replay vectors of the KV prefix cache; exit code 1 if ours decides otherwise."""
    reports = {file: _replayed(file) for file in files}
    for file, report in reports.items():
        _show_replay(file, report)
    if any(report.differences for report in reports.values()):
        raise typer.Exit(EXIT_DIFFERS)


def _replayed(file: Path) -> ReplayReport:
    try:
        return replay_report(file)
    except (OSError, VectorFileError, ModuleNotFoundError) as error:
        error_console().print(f"error: {error}", markup=False)
        raise typer.Exit(EXIT_BAD_INPUT) from error


def _show_check(report: GoldenReport) -> None:
    console = output_console()
    console.print(
        f"{report.backend}: {count(report.traces)} traces, {count(report.takes)} deliveries, "
        f"{count(len(report.differences))} different",
        markup=False,
    )
    for found in report.differences[:_SHOWN]:
        where = f"{found.trace} ({found.mode}), step {found.step}"
        console.print(f"{where}: {found.reason}", markup=False, style="red")


def _show_replay(file: Path, report: ReplayReport) -> None:
    console = output_console()
    console.print(
        f"{file}: {count(report.num_hash_vectors)} hash vectors, "
        f"{count(report.num_manager_ops)} manager operations, "
        f"{count(report.num_scheduler_steps)} scheduler steps, {count(report.num_values)} values; "
        f"{count(len(report.differences))} different, "
        f"{count(len(report.exceptions))} different on purpose",
        markup=False,
    )
    for found in report.differences[:_SHOWN]:
        console.print(str(found), markup=False, style="red")
