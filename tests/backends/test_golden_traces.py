"""The recorded golden traces on the device backends: every hash that the reference delivered."""

from __future__ import annotations

import pytest

from slotmirror.conformance.golden import check
from slotmirror.conformance.golden.check import check_traces
from slotmirror.conformance.golden.recording import read_recordings
from support.stand_in.backends import OnStandIn, StandInCuda, StandInNpu, StandInTorch
from support.stand_in.bench import StandInWorkbench

BACKENDS = (StandInCuda, StandInNpu, StandInTorch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_recorded_deliveries_are_reproduced(
    backend: type[OnStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each backend has a third of the traces, in all modes: they are minutes of work together."""
    monkeypatch.setattr(check, "default_workbench", StandInWorkbench)
    recordings = read_recordings(None)[BACKENDS.index(backend) :: len(BACKENDS)]
    report = check_traces(recordings, backend.name, backend)
    assert report.differences == []
    assert report.takes > 500
