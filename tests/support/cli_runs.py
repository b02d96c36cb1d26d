"""Runs of the command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from slotmirror.cli import app

# Wide enough that no table cell and no error is wrapped.
_WIDE = {"COLUMNS": "250", "TERM": "dumb", "NO_COLOR": "1"}


def run_cli(*arguments: object) -> Result:
    """The exit code and the two outputs of `slotmirror ARGUMENTS`."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=_WIDE)


def table_rows(stdout: str) -> dict[str, list[str]]:
    """The rows of the tables that a command printed: first cell → the cells behind it."""
    lines = (line for line in stdout.splitlines() if line.startswith("│"))
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    return {first: rest for first, *rest in rows}


def error_line(result: Result) -> str:
    """The one line on stderr that a refused command ends with; fails on anything else."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert result.stdout == ""
    return lines[0]
