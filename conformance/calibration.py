"""Where direct capture begins to pay on a device: `slotmirror calibrate`.

For runs of growing length, the time of one copy device → page plus the scatter into the pool is
measured beside the time of one copy device → pool. The crossover is the shortest run from which on
the direct copy is faster; it goes into `direct_capture_rows_min`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.errors import NotSupported
from slotmirror.core.host_rows import as_host_rows

WAIT_S = 60.0
DEFAULT_RUNS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Medians for one run length, in microseconds."""

    rows: int
    page_us: float
    direct_us: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; `crossover_rows` is None where direct copies never paid."""

    backend: str
    row_bytes: int
    times: tuple[RunTimes, ...]

    @property
    def crossover_rows(self) -> int | None:
        """The shortest measured run from which on every direct copy was faster."""
        crossover = None
        for entry in reversed(self.times):
            if entry.direct_us >= entry.page_us:
                break
            crossover = entry.rows
        return crossover


def calibrate(
    backend: DeviceBackend,
    row_bytes: int,
    runs: Sequence[int] = DEFAULT_RUNS,
    repeats: int = 30,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure both paths on this backend's device for rows of `row_bytes` bytes.

    Raises `NotSupported` for a backend whose copies are not asynchronous into page-locked memory:
    it never captures directly.
    """
    abilities = backend.capabilities
    if not (abilities.async_copy and abilities.pinned_host):
        raise NotSupported(
            f"backend {backend.name!r} does not copy asynchronously into page-locked memory: "
            "direct capture is never used on it"
        )
    backend.bind_thread(backend.device)
    bench = _Bench(backend, max(runs), row_bytes, clock)
    try:
        return Calibration(
            backend.name, row_bytes, tuple(bench.measure(rows, repeats) for rows in runs)
        )
    finally:
        bench.close()


class _Bench:
    """Buffers of both paths, and one measurement."""

    def __init__(
        self, backend: DeviceBackend, rows_max: int, row_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._clock = clock
        shape = (rows_max, row_bytes)
        self._source = torch.zeros(shape, dtype=torch.uint8, device=backend.device)
        self._page = backend.alloc_host(shape, torch.uint8, pinned=True)
        self._pool = backend.alloc_host(shape, torch.uint8, pinned=True)
        self._stream = backend.new_stream()
        self._fence = backend.new_fence()

    def measure(self, rows: int, repeats: int) -> RunTimes:
        """Both paths in turn, `repeats` times after a warm-up."""
        slots = np.arange(rows, dtype=np.int64)
        pool = as_host_rows(self._pool.tensor)
        page = as_host_rows(self._page.tensor)[:rows]

        def through_page() -> None:
            self._copy(self._page.tensor[:rows], rows)
            self._backend.scatter_slots(pool, slots, page)

        def directly() -> None:
            self._copy(self._pool.tensor[:rows], rows)

        times: dict[Callable[[], None], list[float]] = {through_page: [], directly: []}
        for number in range(repeats + 3):
            for path, found in times.items():
                started = self._clock()
                path()
                if number >= 3:
                    found.append(self._clock() - started)
        page_us, direct_us = (statistics.median(found) * 1e6 for found in times.values())
        return RunTimes(rows, page_us, direct_us)

    def _copy(self, destination: torch.Tensor, rows: int) -> None:
        pairs = [(self._source[:rows], destination)]
        after = self._backend.current_stream()
        self._backend.copy_to_host(pairs, self._stream, after, self._fence)
        # A waiting fence may sleep between looks; what is measured here is shorter than that.
        deadline = self._clock() + WAIT_S
        while not self._fence.done():
            if self._clock() > deadline:
                raise TimeoutError(f"a copy of {rows} rows took more than {WAIT_S:g} s")

    def close(self) -> None:
        """Give the host memory back."""
        self._page.close()
        self._pool.close()
