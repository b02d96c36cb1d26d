"""`slotmirror conformance`: the conformance kit on one installed backend."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import check_json_file, write_json
from slotmirror.conformance.backend_suite.performing import Outcome
from slotmirror.conformance.backend_suite.report import ConformanceReport, report_on

_STYLES = {"passed": "green", "failed": "red", "refused": "yellow", "deviation": "yellow"}


def conformance(
    name: Annotated[str, typer.Argument(help="Name of an installed backend.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file, as JSON.")
    ] = None,
) -> None:
    """Check a device backend against its contract; exit code 1 if a check fails."""
    console = output_console()
    with bad_input_exits():
        check_json_file(json_file)
        report = report_on(name, progress=lambda outcome: console.print(_line(outcome)))
        write_json(json_file, report.as_json())
    console.print(_summary(report))
    if not report.ok:
        raise typer.Exit(1)


def _line(outcome: Outcome) -> Text:
    text = Text(f"{outcome.status:9} ", _STYLES[outcome.status])
    text.append(outcome.check.name.replace("_", " "), "default")
    if outcome.detail:
        text.append(f": {outcome.detail}", "default")
    return text


def _summary(report: ConformanceReport) -> Table:
    table = Table(title=f"{report.installed.name} of {report.installed.distribution}")
    for status in _STYLES:
        table.add_column(status, justify="right")
    table.add_row(*(str(report.counts[status]) for status in _STYLES))
    return table
