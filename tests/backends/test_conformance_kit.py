"""The kit as a product: outcomes, deviations, report, command, and pytest's own way to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.backend_suite.check import Check, Refused, require
from slotmirror.conformance.backend_suite.deviations import FILE_NAME, deviations_of
from slotmirror.conformance.backend_suite.performing import perform
from slotmirror.conformance.backend_suite.suite import (
    ALL_CHECKS,
    CHECK_NAMES,
    BackendConformance,
)
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.core.errors import ConfigError
from support.cli_runs import error_line, run_cli


def bench() -> Workbench:
    """The reference's."""
    return Workbench(CpuRefBackend())


def check(body) -> Check:
    """A check that does this."""
    return Check("planted", "Planted.", body)


def refuse(_bench: Workbench) -> None:
    raise Refused("no such device here")


def leave(_bench: Workbench) -> None:
    raise SystemExit("the vendor's library exits")


@pytest.mark.parametrize(
    ("body", "known", "status", "detail"),
    [
        (lambda bench: None, {}, "passed", ""),
        (lambda bench: require(False, "wrong bytes"), {}, "failed", "CheckFailed: wrong bytes"),
        (leave, {}, "failed", "SystemExit: the vendor's library exits"),
        (refuse, {}, "refused", "no such device here"),
        (lambda bench: require(False, "x"), {"planted": "known"}, "deviation", "known"),
        (lambda bench: None, {"planted": "known"}, "failed", "is listed as a deviation (known)"),
    ],
)
def test_a_check_has_one_of_four_outcomes(body, known, status: str, detail: str) -> None:
    """Passed, failed, refused, or a known deviation; a listed check that passes is a failure."""
    outcome = perform(check(body), bench, known)
    assert outcome.status == status
    assert outcome.detail.startswith(detail)


def test_what_the_device_saw_counts() -> None:
    """Rules that the device saw broken fail the check that broke them."""

    class Seeing(Workbench):
        def violations(self) -> list[str]:
            return ["a copy of a closed buffer"]

    outcome = perform(check(lambda bench: None), lambda: Seeing(CpuRefBackend()), {})
    assert outcome.status == "failed"
    assert "a copy of a closed buffer" in outcome.detail


def test_the_users_interrupt_passes() -> None:
    """Ctrl-C ends the run and is no outcome."""

    def interrupt(_bench: Workbench) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(check(interrupt), bench, {})


def test_every_check_is_a_test_that_says_what_must_hold() -> None:
    """Names are unique sentences; the class has one method for each, with the check's text."""
    assert len(CHECK_NAMES) == len(ALL_CHECKS) >= 45
    for one in ALL_CHECKS:
        method = getattr(BackendConformance, f"test_{one.name}")
        assert method.__doc__ == one.text
        assert one.text


class Deviating(CpuRefBackend):
    """Its module lies in a folder that the test writes into."""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file beside the module of `Deviating`."""
    monkeypatch.setattr(sys.modules[Deviating.__module__], "__file__", str(tmp_path / "m.py"))
    return tmp_path / FILE_NAME


def test_deviations_stand_in_a_file_beside_the_backend(beside: Path) -> None:
    """Check and reason per line, comments apart; without the file there are none."""
    assert deviations_of(Deviating, CHECK_NAMES) == {}
    beside.write_text(
        "# reviewed 2026-11\n\nhost_buffers_are_aligned: the driver aligns to 16 bytes\n"
    )
    assert deviations_of(Deviating, CHECK_NAMES) == {
        "host_buffers_are_aligned": "the driver aligns to 16 bytes"
    }


@pytest.mark.parametrize("line", ["no_such_check: because", "host_buffers_are_aligned", "x: "])
def test_a_deviation_without_check_or_reason_is_refused(beside: Path, line: str) -> None:
    """The error names the file and the line."""
    beside.write_text(line)
    with pytest.raises(ConfigError, match=rf"{FILE_NAME}=.*must be `check: reason`"):
        deviations_of(Deviating, CHECK_NAMES)


def test_the_command_reports_on_an_installed_backend(tmp_path: Path) -> None:
    """Exit code 0, a line per check, and a report with versions, capabilities and counts."""
    file = tmp_path / "report.json"
    result = run_cli("conformance", "cpu_ref", "--json", file)
    assert result.exit_code == 0, result.output
    assert "the last of duplicate slots stays" in result.output
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["ok"] is True
    assert report["backend"]["distribution"] == "slotmirror"
    assert report["versions"]["slotmirror"] == version("slotmirror")
    assert report["capabilities"]["async_copy"] is False
    assert report["failed"] == 0
    assert report["passed"] == len(report["checks"]) == len(ALL_CHECKS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "no backend 'nowhere'"), ("npu", "backend 'npu' is unavailable: ")],
)
def test_the_command_refuses_what_cannot_be_checked(name: str, reason: str) -> None:
    """One line and exit code 2: nothing was checked."""
    result = run_cli("conformance", name)
    assert result.exit_code == 2
    assert error_line(result).startswith(f"error: {reason}")


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a fresh folder, outside this repository's settings."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_pytest_runs_the_kit_by_name_with_no_file_at_all(tmp_path: Path) -> None:
    """`pytest --pyargs slotmirror.conformance --backend NAME`."""
    done = pytest_run(
        *(tmp_path, "--pyargs", "slotmirror.conformance", "--backend", "cpu_ref"),
        *("-k", "duplicate or aligned or alloc"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "the conformance kit needs --backend NAME"),
        (("--backend", "nowhere"), "no backend 'nowhere'; installed: cpu_ref"),
    ],
)
def test_pytest_without_a_backend_says_what_is_missing(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    """One error, not one per check."""
    done = pytest_run(tmp_path, "--pyargs", "slotmirror.conformance", *arguments)
    assert done.returncode == 4
    assert f"ERROR: {error}" in done.stdout + done.stderr


def test_pytest_skips_the_kit_where_the_device_is_missing(tmp_path: Path) -> None:
    """Absent hardware is a skip with the probe's reason."""
    done = pytest_run(tmp_path, "--pyargs", "slotmirror.conformance", "--backend", "npu", "-rs")
    assert done.returncode == 0, done.stdout
    assert f"{len(ALL_CHECKS)} skipped" in done.stdout
    assert "backend 'npu' is unavailable: torch_npu" in done.stdout


TEST_FILE = """
from slotmirror.conformance.backend_suite.suite import BackendConformance


class TestMine(BackendConformance):
    backend_name = "cpu_ref"
"""


def test_a_test_file_of_five_lines_is_enough(tmp_path: Path) -> None:
    """What a backend's author writes."""
    (tmp_path / "test_mine.py").write_text(TEST_FILE)
    done = pytest_run(tmp_path, "-k", "duplicate or aligned")
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
