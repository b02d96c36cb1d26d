"""`slotmirror backends`: what is installed, and what can serve here."""

from rich.table import Table
from rich.text import Text

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.core.registry import BackendReport, report_backends


def backends() -> None:
    """List every installed backend: where it comes from, and available or why not."""
    with bad_input_exits():
        reports = report_backends()
    table = Table(title="Installed backends")
    for column in ("backend", "distribution", "version", "chosen", "available", "why"):
        table.add_column(column, overflow="fold")
    for report in reports:
        table.add_row(*_row(report))
    output_console().print(table)


def _row(report: BackendReport) -> tuple[Text, ...]:
    installed, probe = report.installed, report.probe
    return (
        Text(installed.name),
        Text(installed.distribution),
        Text(installed.version),
        Text("automatically" if report.automatic else "by name"),
        Text("yes", "green") if probe.available else Text("no", "red"),
        Text(probe.reason),
    )
