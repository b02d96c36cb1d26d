"""Checking: play the golden traces on a backend and compare every hash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from slotmirror.conformance.backend_suite.performing import default_workbench
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.golden.player import Mode, Player
from slotmirror.conformance.golden.recording import Recording, Take, read_recordings
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.traces.rows import RowTable
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.registry import load_backend

MODES = (
    Mode("threaded"),
    Mode("threaded", prefetch=False),
    Mode("inline"),
    Mode("inline", prefetch=False),
)
"""All four must deliver the same bytes (H5)."""


@dataclass(frozen=True, slots=True)
class GoldenDifference:
    """A call that did not deliver what was recorded."""

    trace: str
    mode: str
    step: int
    reason: str


@dataclass(slots=True)
class GoldenReport:
    """What a check found."""

    backend: str
    traces: int = 0
    takes: int = 0
    differences: list[GoldenDifference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was delivered as recorded."""
        return self.takes > 0 and not self.differences


def check_backend(name: str | None, path: Path | None = None) -> GoldenReport:
    """Play a file of traces, by default the shipped one, on an installed backend."""
    recordings = read_recordings(path)
    backend = load_backend(name)
    return check_traces(recordings, backend.name, lambda: load_backend(backend.name))


def check_traces(
    recordings: list[Recording], name: str, new_backend: Callable[[], DeviceBackend]
) -> GoldenReport:
    """Play these traces in every mode, each on a new backend."""
    report = GoldenReport(name)
    with quiet_core():
        for recording in recordings:
            report.traces += 1
            for mode in MODES:
                bench = default_workbench(new_backend())
                with bench.active():
                    report.differences += play(recording, bench, mode)
                report.takes += sum(len(step.takes) for step in recording.steps)
                report.takes += len(recording.last_takes)
    return report


def play(recording: Recording, bench: Workbench, mode: Mode) -> list[GoldenDifference]:
    """Play one trace on the bench's backend, inside the bench; every call that differs."""
    rows = RowTable(max(_last_stamps(recording), default=0))
    player = Player(bench, rows, recording.config, recording.policy, mode)
    found: list[GoldenDifference] = []
    with closing(player):
        for step in recording.steps:
            player.start(step)
            found += _take_all(player, step.takes, recording.name, str(mode))
            if step.saved:
                player.save(step)
        found += _take_all(player, recording.last_takes, recording.name, str(mode))
        player.finish()
        if mode.direct and not player.has_captured_directly:
            reason = "no row was captured directly"
            found.append(GoldenDifference(recording.name, str(mode), 0, reason))
    return found


def _take_all(
    player: Player, takes: tuple[Take, ...], trace: str, mode: str
) -> Iterator[GoldenDifference]:
    for take in takes:
        if not take.sha256:
            player.discard(take.step)
            continue
        found = player.sha256(take.step, take.req_ids)
        if found != take.sha256:
            reason = f"delivered {found}, recorded {take.sha256}"
            yield GoldenDifference(trace, mode, take.step, reason)


def _last_stamps(recording: Recording) -> Iterator[int]:
    for step in recording.steps:
        for first, count in zip(step.stamps, step.events.num_tokens.tolist(), strict=True):
            yield first + count - 1
