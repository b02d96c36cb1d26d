"""`slotmirror backends`: distribution, version, and available or why not."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from support.cli_runs import error_line, run_cli, table_rows


def install(folder: Path, name: str, entry_point: str) -> None:
    """A distribution's metadata with one backend, as an installer would leave it."""
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[slotmirror.backends]\n{entry_point}\n")


def test_the_reference_backend_is_available() -> None:
    """Our own backend is listed with this distribution's version."""
    result = run_cli("backends")
    assert result.exit_code == 0
    *row, reason = table_rows(result.stdout)["cpu_ref"]
    assert row == ["slotmirror", version("slotmirror"), "automatically", "yes"]
    assert reason


def test_a_backend_that_does_not_load_is_listed_with_its_reason(tmp_path: Path) -> None:
    """A broken plugin is a row of the table; what looks like markup in its message is shown.

    In a process of its own: stevedore keeps the entry points that it saw first.
    """
    install(tmp_path, "broken-plugin", "odd = broken_plugin:Backend")
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no driver [bold]here :-1:')\n")
    result = subprocess.run(
        [sys.executable, "-m", "slotmirror", "backends"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "250", "NO_COLOR": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = table_rows(result.stdout)
    reason = "OSError: no driver [bold]here :-1:"
    assert rows["odd"] == ["broken-plugin", "1.5", "by name", "no", reason]
    assert rows["cpu_ref"][3] == "yes"


def test_one_name_from_two_distributions_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be chosen then: both distributions are named."""
    install(tmp_path, "second-plugin", "cpu_ref = second_plugin:Backend")
    monkeypatch.syspath_prepend(tmp_path)
    result = run_cli("backends")
    assert result.exit_code == 2
    line = error_line(result)
    assert line.startswith("error: a backend name is offered more than once: ")
    assert "cpu_ref of second-plugin" in line
    assert "cpu_ref of slotmirror" in line
