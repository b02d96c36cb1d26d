"""`slotmirror explore`: seeds, replays, reports, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slotmirror.core.slot_table import SlotTable
from support.cli_runs import error_line, run_cli, table_rows


def test_a_fresh_seed_is_printed_and_nothing_is_found() -> None:
    """Two runs start at different seeds; exit code 0."""
    results = [run_cli("explore", "--schedules", 20) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0]
    assert "nothing found" in results[0].stdout
    firsts = {result.stdout.splitlines()[0] for result in results}
    assert len(firsts) == 2
    assert all(first.startswith("first seed ") for first in firsts)


def test_the_report_counts_what_happened(tmp_path: Path) -> None:
    """On the screen and in the JSON file, the same figures."""
    path = tmp_path / "report.json"
    result = run_cli("explore", "--schedules", 30, "--first-seed", 400, "--faults", "--json", path)
    assert result.exit_code == 0
    report = json.loads(path.read_text())
    assert report["first_seed"] == 400
    assert report["schedules"] == 30
    assert report["failed_seed"] is None
    rows = table_rows(result.stdout)
    assert rows["schedules"] == ["30"]
    assert rows["rows"] == [f"{report['counts']['rows']:,}"]


def test_a_find_ends_with_its_seed_the_tail_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The printed command replays exactly that run."""
    monkeypatch.setattr(SlotTable, "claim", lambda self, slots: None)
    result = run_cli("explore", "--schedules", 500, "--first-seed", 90_000)
    assert result.exit_code == 1
    assert "log tail:" in result.stdout
    [command] = [line for line in result.stdout.splitlines() if line.startswith("replay it: ")]
    arguments = command.removeprefix("replay it: slotmirror ").split()
    again = run_cli(*arguments)
    assert again.exit_code == 1
    assert again.stdout.splitlines()[0] == f"first seed {arguments[-1]}"


def test_minutes_bound_a_search() -> None:
    """No time at all is one schedule."""
    result = run_cli("explore", "--schedules", 10**6, "--minutes", 0)
    assert table_rows(result.stdout)["schedules"] == ["1"]


def test_every_schedule_of_the_small_traces_without_deviations() -> None:
    """One schedule each: the default one."""
    result = run_cli("explore", "--every", 0)
    assert result.exit_code == 0
    assert "a block is given away behind a read: 1 schedules, 1 log orders" in result.stdout
    assert "nothing found" in result.stdout


def test_a_report_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """Before any schedule: one line, exit code 2."""
    result = run_cli("explore", "--json", tmp_path / "none" / "report.json")
    assert result.exit_code == 2
    assert "cannot be written" in error_line(result)
