"""`slotmirror calibrate`: from which run length on direct capture pays on this device."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from slotmirror.cli.bad_input import bad_input_exits
from slotmirror.cli.consoles import output_console
from slotmirror.cli.json_report import check_json_file, write_json
from slotmirror.conformance.calibration import Calibration, calibrate
from slotmirror.core.registry import load_backend


def calibrate_backend(
    backend: Annotated[
        str | None, typer.Option(help="Device backend; chosen automatically if not given.")
    ] = None,
    row_bytes: Annotated[int, typer.Option(help="Bytes of a row.", min=1)] = 4096,
    repeats: Annotated[int, typer.Option(help="Measurements of each length.", min=1)] = 30,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result here too.")
    ] = None,
) -> None:
    """Measure page plus scatter beside direct copies into a page-locked pool."""
    with bad_input_exits():
        check_json_file(json_file)
        result = calibrate(load_backend(backend), row_bytes, repeats=repeats)
        write_json(json_file, _json(result))
    console = output_console()
    console.print(_table(result))
    crossover = result.crossover_rows
    console.print(
        "direct copies never paid: leave direct_capture_rows_min unset"
        if crossover is None
        else f"direct_capture_rows_min={crossover}, with pin_pool=True"
    )


def _table(result: Calibration) -> Table:
    table = Table(title=f"{result.backend}, rows of {result.row_bytes:,} B")
    for column in ("rows in a run", "page + scatter", "direct"):
        table.add_column(column, justify="right")
    for entry in result.times:
        table.add_row(f"{entry.rows:,}", f"{entry.page_us:,.1f} µs", f"{entry.direct_us:,.1f} µs")
    return table


def _json(result: Calibration) -> dict[str, object]:
    return {
        "backend": result.backend,
        "row_bytes": result.row_bytes,
        "crossover_rows": result.crossover_rows,
        "times": [
            {"rows": t.rows, "page_us": t.page_us, "direct_us": t.direct_us} for t in result.times
        ],
    }
