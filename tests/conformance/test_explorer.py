"""The explorer on the cache as it is: nothing is found, everything happens, seeds replay."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from slotmirror.conformance.explorer.choices import SeededChoices
from slotmirror.conformance.explorer.exhaustive import explore_all
from slotmirror.conformance.explorer.faults import FaultJudge, FaultPlanned, Reaction, Trouble
from slotmirror.conformance.explorer.run import ExploredRun, RunFailure, RunOptions
from slotmirror.conformance.explorer.scheduler import ScheduleError
from slotmirror.conformance.explorer.search import ExploreReport, explore, quiet_runs, run_seed
from slotmirror.conformance.simulated import FaultKind
from slotmirror.conformance.traces.generate import TraceOptions, draw_trace
from slotmirror.conformance.traces.scenarios import scenarios
from slotmirror.core import committer
from slotmirror.core.errors import CacheFailedError, WaitTimeoutError
from support.mutants import insides

SCHEDULES = 600
FAULTS = 600


@pytest.fixture(scope="module")
def explored() -> ExploreReport:
    """One search, looked at by several tests."""
    return explore(5_000_000, SCHEDULES)


@pytest.fixture(scope="module")
def faulty() -> ExploreReport:
    """One search with a fault in every run."""
    return explore(6_000_000, FAULTS, faults=True)


def test_no_schedule_delivers_a_wrong_row_or_leaves_anything_behind(explored) -> None:
    """Every row equals the plain model's; pages, bytes, threads and locks are given back."""
    assert explored.failure == ""
    assert explored.schedules == SCHEDULES
    assert explored.counts["rows"] > 30_000


def test_everything_that_may_happen_does(explored) -> None:
    """A search that avoids the dangers proves nothing: each comes up in these few schedules."""
    at_least = {
        "hits": 800,
        "same-step hit rows": 200,
        "recycled blocks": 500,
        "reads after recycling": 10,
        "preemptions": 200,
        "resumes": 150,
        "continuations": 300,
        "replacements": 50,
        "aborts": 100,
        "names used again": 30,
        "drafted rows": 200,
        "unverified drafts asked for": 20,
        "replays asked for too early": 20,
        "hits without rows": 30,
        "discards": 100,
        "resets": 20,
        "refused keys": 40,
        "deferred rows dead": 20,
        "outputs read late": 500,
        "rows read on the device": 8000,
        "rows captured directly": 500,
        "batches closed by ended": 200,
        "batches closed by preempted": 50,
        "batches closed by hit": 20,
        "batches closed by budget": 200,
        "batches closed by reset": 5,
    }
    missing = {name: explored.counts[name] for name in at_least}
    assert {n: c for n, c in missing.items() if c < at_least[n]} == {}


def test_most_schedules_have_a_log_order_of_their_own(explored) -> None:
    """The seeds do not play the same schedule again and again."""
    assert len(explored.log_orders) > SCHEDULES // 2


def test_faults_are_named_stay_and_leave_nothing_behind(faulty) -> None:
    """W5, W6, S3: no wrong row, no hang, the cause in every error, pages and bytes back at zero."""
    assert faulty.failure == ""
    assert faulty.schedules == FAULTS
    assert faulty.counts["failed caches"] > 100


def test_every_kind_of_fault_happens(faulty) -> None:
    """Each kind, several times."""
    names = [kind.name.lower() for kind in (*FaultKind, *Trouble)]
    assert [name for name in names if not faulty.counts[f"fault {name}"]] == []
    assert sum(faulty.counts[f"fault {name}"] for name in names) > 250


def test_a_seed_is_one_run_in_every_process() -> None:
    """The same points, switches and log order, whatever the process's hash seed."""
    program = (
        "from slotmirror.conformance.explorer.search import quiet_runs, run_seed\n"
        "with quiet_runs():\n"
        "    runs = [run_seed(seed, faults=seed % 2 == 0) for seed in range(40, 70)]\n"
        "print([(run.points, run.switches, run.log_order) for run in runs])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_failing_run_has_a_seed_and_the_logs_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's seed alone plays the failure again."""
    insides.CLAIM.replace(monkeypatch, lambda self, slots: None)
    report = explore(90_000, 500)
    assert report.failed_seed is not None
    assert "log tail:\n" in report.failure
    assert "write step" in report.failure
    with quiet_runs(), pytest.raises(RunFailure) as caught:
        run_seed(report.failed_seed)
    assert str(caught.value) == report.failure


@pytest.mark.parametrize("name", scenarios())
def test_every_schedule_of_a_small_trace_with_one_deviation(name: str) -> None:
    """Each written trace, wherever one actor or queue goes out of turn."""
    report = explore_all(scenarios()[name], deviations_max=1)
    assert report.failure == ""
    assert report.complete
    assert report.schedules > 200
    assert report.log_orders > 2


def test_an_exhaustive_search_names_the_deviations_of_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Played alone they fail again; without them the trace is clean."""
    insides.CLAIM.replace(monkeypatch, lambda self, slots: None)
    report = explore_all(scenarios()["a forward that fails on recycled slots"], deviations_max=1)
    assert report.failed is not None
    assert "without rows of ['d']" in report.failure


class _NoDevice:
    """What a judge needs of a backend."""

    def __init__(self, *raised: str) -> None:
        self.faults = self
        self.raised = list(raised)

    def arm(self, kind: FaultKind, number: int) -> None:
        """Nothing is armed."""


def judge(kind: FaultKind | Trouble | None, *raised: str) -> FaultJudge:
    planned = None if kind is None else FaultPlanned(kind, 1)
    return FaultJudge(planned, _NoDevice(*raised), None)  # type: ignore[arg-type]


def test_an_error_that_the_fault_does_not_explain_ends_the_run() -> None:
    """Its chain must name the injected fault."""
    cause = RuntimeError("injected fault: pool_write number 1")
    with pytest.raises(ScheduleError, match="no fault explains"):
        judge(FaultKind.POOL_WRITE, str(cause)).judge(CacheFailedError(OSError("else"), "x"))
    explained = judge(FaultKind.POOL_WRITE, str(cause))
    assert explained.judge(CacheFailedError(cause, "x")) is Reaction.STOP


def test_a_failure_must_keep_its_first_cause() -> None:
    """Two causes in one run are a defect."""
    first = RuntimeError("injected fault: pool_write number 1")
    second = RuntimeError("injected fault: pool_write number 1")
    found = judge(FaultKind.POOL_WRITE, str(first))
    found.judge(CacheFailedError(first, "x"))
    with pytest.raises(ScheduleError, match="the cache failed with"):
        found.judge(CacheFailedError(second, "x"))


@pytest.mark.parametrize("kind", [None, FaultKind.POOL_READ])
def test_a_time_out_without_a_reason_ends_the_run(kind: FaultKind | None) -> None:
    """Nothing hangs where nothing stalls."""
    with pytest.raises(ScheduleError, match=r"without reason|a legal call met WaitTimeout"):
        judge(kind).judge(WaitTimeoutError("unconsumed step ids []"))


def test_gathers_that_are_split_among_helpers_are_as_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`mover_threads`: helpers are actors too; every gather is split that has two rows."""
    monkeypatch.setattr(committer, "SPLIT_BYTES_MIN", 8)
    rows = 0
    with quiet_runs():
        for seed in range(150):
            trace, _ = draw_trace(seed // 3, TraceOptions(steps=6))
            split = replace(trace, config=replace(trace.config, mover_threads=2 + seed % 2))
            options = RunOptions(early_shutdown=seed % 5 == 0)
            run = ExploredRun(split, SeededChoices(seed), seed, options)
            rows += run.play().counts["rows"]
    assert rows > 4000
