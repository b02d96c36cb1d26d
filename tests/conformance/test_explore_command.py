"""`slotmirror explore`: seeds, replays, reports, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from slotmirror.conformance.explorer import parallel
from slotmirror.conformance.explorer.search import explore
from slotmirror.conformance.simulated import SimulatedBackend
from support.cli_runs import error_line, run_cli, table_rows
from support.mutants import insides


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
    insides.CLAIM.replace(monkeypatch, lambda self, slots: None)
    result = run_cli("explore", "--schedules", 500, "--first-seed", 90_000)
    assert result.exit_code == 1
    assert "log tail:" in result.stdout
    [command] = [line for line in result.stdout.splitlines() if line.startswith("replay it: ")]
    arguments = command.removeprefix("replay it: slotmirror ").split()
    again = run_cli(*arguments)
    assert again.exit_code == 1
    assert again.stdout.splitlines()[0] == f"first seed {arguments[-1]}"


def test_processes_share_the_seeds_with_and_without_faults(tmp_path: Path) -> None:
    """Every seed once, the kinds in turn; the counts are those of one process after the other."""
    path = tmp_path / "report.json"
    arguments = ["--both", "--processes", 2, "--schedules", 410, "--first-seed", 800]
    result = run_cli("explore", *arguments, "--json", path)
    assert result.exit_code == 0, result.stdout
    report = json.loads(path.read_text())
    plain, faulty = explore(800, 200), explore(1000, 200, faults=True)
    rest = explore(1200, 10)
    assert report["schedules"] == 410
    assert report["counts"] == dict(plain.counts + faulty.counts + rest.counts)
    assert "nothing found" in result.stdout


class Here:
    """Does the work of a pool of processes in this one, when it is asked for."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[[object], object], piece: object) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(call(piece))
        return future


def test_a_find_in_a_piece_is_the_searchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that replays it says whether it was a fault schedule; no piece follows."""
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(SimulatedBackend, "scatter_slots", lambda self, pool, slots, rows: None)
    result = run_cli("explore", "--both", "--processes", 2, "--first-seed", 0)
    assert result.exit_code == 1
    [command] = [line for line in result.stdout.splitlines() if line.startswith("replay it: ")]
    again = run_cli(*command.removeprefix("replay it: slotmirror ").split())
    assert again.exit_code == 1
    assert int(table_rows(result.stdout)["schedules"][0]) < 400


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
