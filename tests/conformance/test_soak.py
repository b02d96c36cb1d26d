"""`slotmirror soak`: a short one is right and flat; a wrong row, a leak, a thread end it badly."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.soak.samples import SAMPLES_MIN, Flatness, Sample
from slotmirror.conformance.soak.soak import soak
from slotmirror.core.backend import DeviceBackend
from support.cli_runs import run_cli, table_rows

ROUNDS = 16
LONG_S = 300.0


@pytest.mark.parametrize("make", [CpuRefBackend, SimulatedBackend])
def test_a_short_soak_is_right_and_flat(make: type[DeviceBackend]) -> None:
    """Real threads, and everything that an engine may do; at rest nothing is left."""
    report = soak(make(), 21, seconds=LONG_S, rounds_max=ROUNDS)
    assert report.faults() == []
    assert report.rounds == ROUNDS
    assert report.flatness is not None
    happened = ["hits", "same-step hit rows", "recycled blocks", "batches closed by ended",
                "aborts", "preemptions", "resumes", "continuations", "replacements",
                "outputs read late", "discards"]  # fmt: skip
    assert [name for name in happened if not report.counts[name]] == []
    assert report.counts["rows"] > 3000
    assert bool(report.counts["rows read on the device"]) == (make is SimulatedBackend)


class LosesRows(CpuRefBackend):
    """Writes nothing after a while."""

    writes = 0

    def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
        self.writes += 1
        if self.writes < 20:
            super().scatter_slots(pool, slots, rows)


def test_a_wrong_row_ends_the_soak_with_its_place() -> None:
    """At once, though engine and builders are in the middle of calls."""
    report = soak(LosesRows(), 21, seconds=LONG_S, rounds_max=ROUNDS)
    assert report.rounds < ROUNDS
    assert "WrongDelivery: step" in report.failure
    assert report.faults()[0] == report.failure


class KeepsObjects(CpuRefBackend):
    """Remembers every write for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[list[int]] = []

    def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
        super().scatter_slots(pool, slots, rows)
        self.kept.append([*slots.tolist(), []])


def test_an_object_that_is_left_by_every_write_is_not_flat() -> None:
    """Long before the resident set tells."""
    report = soak(KeepsObjects(), 21, seconds=LONG_S, rounds_max=ROUNDS)
    assert report.failure == ""
    [fault] = report.faults()
    assert fault.endswith("objects more every round")


FLAT = [Sample(number, 1 + number // 20, number, 200 << 20, 1000, 3, 0, 0) for number in range(40)]


def test_what_is_not_flat_is_said() -> None:
    """The resident set, objects per round and per cache, threads and pages, each by itself."""
    assert Flatness.of(FLAT, [900] * 4).faults() == []
    grows = [replace(s, resident_bytes=s.resident_bytes + s.round * (1 << 20)) for s in FLAT]
    assert "the resident set grew" in Flatness.of(grows, [900] * 4).faults()[0]
    assert (
        "objects more every round"
        in Flatness.of([replace(s, objects=1000 + 6 * s.round) for s in FLAT], [900] * 4).faults()[
            0
        ]
    )
    assert "objects are left of every cache" in Flatness.of(FLAT, [900, 920, 940, 960]).faults()[0]
    assert "threads" in Flatness.of([*FLAT[:-1], replace(FLAT[-1], threads=4)], []).faults()[0]
    assert "pages" in Flatness.of([replace(FLAT[0], pages_held=1), *FLAT[1:]], []).faults()[0]


def test_caches_of_different_sizes_are_flat() -> None:
    """A level of objects for each cache; growth counts within one."""
    steps = [replace(s, objects=1000 * s.cache) for s in FLAT]
    assert Flatness.of(steps, [900] * 4).faults() == []


def test_the_command_prints_its_seed_and_writes_a_report(tmp_path: Path) -> None:
    """A fresh seed; too few rounds are right or wrong, and not judged further."""
    path = tmp_path / "soak.json"
    result = run_cli("soak", "--rounds", 2, "--json", path)
    assert result.exit_code == 0, result.stdout
    report = json.loads(path.read_text())
    assert result.stdout.splitlines()[0] == f"seed {report['seed']}"
    assert table_rows(result.stdout)["rows"] == [f"{report['counts']['rows']:,}"]
    assert report["flatness"] is None
    assert f"flatness takes {SAMPLES_MIN} rounds" in result.stdout


def test_the_command_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the command that soaks the same caches again."""
    monkeypatch.setattr(CpuRefBackend, "gather_slots", lambda self, pool, slots, out: None)
    result = run_cli("soak", "--rounds", 4, "--seed", 7)
    assert result.exit_code == 1
    assert "WrongDelivery" in result.stdout
    assert "again: slotmirror soak --backend cpu_ref --seed 7" in result.stdout


def test_no_thread_outlives_a_soak() -> None:
    """Movers and builders are joined."""
    before = threading.active_count()
    soak(CpuRefBackend(), 4, seconds=0.0)
    assert threading.active_count() == before
