"""`calibrate`: the crossover of direct capture, with a clock in the test's hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from typer.testing import CliRunner

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.cli import app
from slotmirror.conformance.calibration import Calibration, RunTimes, calibrate
from slotmirror.core.backend import Capabilities, Fence, Stream
from slotmirror.core.errors import NotSupported


class Timed(CpuRefBackend):
    """A copy takes 10 µs and 1 µs per row into the pool; a scatter takes `scatter_us(rows)`."""

    def __init__(self, scatter_us: dict[int, float]) -> None:
        super().__init__()
        self.now_s = 0.0
        self._scatter_us = scatter_us

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(async_copy=True, pinned_host=True)

    def copy_to_host(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        super().copy_to_host(pairs, stream, after, fence)
        self.now_s += (10 + len(pairs[0][0])) / 1e6

    def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
        super().scatter_slots(pool, slots, rows)
        self.now_s += self._scatter_us[len(slots)] / 1e6


def test_both_paths_are_measured_for_every_run_length() -> None:
    """Medians of a copy and a scatter beside a copy alone."""
    backend = Timed({1: 5, 8: 40})
    result = calibrate(backend, 16, runs=(1, 8), repeats=3, clock=lambda: backend.now_s)
    assert [t.rows for t in result.times] == [1, 8]
    assert [t.direct_us for t in result.times] == pytest.approx([11, 18])
    assert [t.page_us for t in result.times] == pytest.approx([16, 58])
    assert result.crossover_rows == 1


@pytest.mark.parametrize(
    ("direct_us", "crossover"),
    [([9, 9, 9], 1), ([11, 9, 9], 4), ([9, 11, 9], 16), ([9, 9, 11], None), ([11, 11, 11], None)],
)
def test_the_crossover_is_where_direct_copies_begin_to_stay_faster(
    direct_us: list[float], crossover: int | None
) -> None:
    """A shorter run that happened to be faster does not count."""
    times = tuple(RunTimes(rows, 10, us) for rows, us in zip((1, 4, 16), direct_us, strict=True))
    assert Calibration("x", 8, times).crossover_rows == crossover


def test_a_synchronous_backend_is_refused() -> None:
    """It never captures directly; the command ends with one line and exit code 2."""
    with pytest.raises(NotSupported, match="direct capture is never used on it"):
        calibrate(CpuRefBackend(), 16)
    result = CliRunner().invoke(app, ["calibrate", "--backend", "cpu_ref"])
    assert result.exit_code == 2
    assert "direct capture is never used" in result.stderr
