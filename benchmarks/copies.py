"""Plain copies: where they go, and how ours compare with them, in turn."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from measuring import low_us, median_us
from peers.ours import STAGING_DEPTH
from workloads import WIDTH

ROW_BYTES = WIDTH * 2
WARM_ROUNDS = STAGING_DEPTH + 2
HUGE_BYTES_MIN = 4 << 20

Rows = npt.NDArray[np.void]
Seconds = Callable[[], float]


@dataclass(frozen=True)
class Comparison:
    """One measure: microseconds of ours and of `copies` plain copies."""

    name: str
    rows: int
    destinations: str
    copies: int
    ours_us: float
    copy_us: float
    ratio: float
    ratio_low: float


def compare(
    name: str, rows: int, destinations: str, ours: Seconds, copies: dict[int, Seconds], rounds: int
) -> list[Comparison]:
    """Ours and each number of copies in turn; every callable runs once, and returns its seconds."""
    times: dict[int, list[float]] = {0: [], **{count: [] for count in copies}}
    for number in range(WARM_ROUNDS + rounds):
        for count, run in ((0, ours), *copies.items()):
            seconds = run()
            if number >= WARM_ROUNDS:
                times[count].append(seconds)
    mine = times[0]
    return [
        Comparison(
            name,
            rows,
            destinations,
            count,
            median_us(mine),
            median_us(times[count]),
            median_us(mine) / median_us(times[count]),
            low_us(mine) / low_us(times[count]),
        )
        for count in copies
    ]


class Destinations:
    """Where plain copies go: `count` buffers in turn, or memory that is mapped for each copy."""

    def __init__(self, rows: int, *, fresh: bool, count: int = 1) -> None:
        self._rows = rows
        self._fresh = fresh
        self._buffers = [] if fresh else [touched(rows) for _ in range(count)]
        self._next = 0

    def take(self) -> Rows:
        """The next one."""
        if self._fresh:
            return mapped(self._rows)
        self._next = (self._next + 1) % len(self._buffers)
        return self._buffers[self._next]


def mapped(rows: int) -> Rows:
    """Untouched memory of its own; unmapped with its last view."""
    num_bytes = rows * ROW_BYTES
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE)
    if num_bytes >= HUGE_BYTES_MIN:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.dtype((np.void, ROW_BYTES)))


def touched(rows: int) -> Rows:
    memory = mapped(rows)
    memory.view(np.uint8)[:] = 1
    return memory


def timed(work: Callable[[], object], clock: Seconds = time.perf_counter) -> float:
    start = clock()
    work()
    return clock() - start


def copy_chain(source: Rows, pages: Destinations, pool: Rows, outputs: Destinations) -> Seconds:
    """The three copies of a prefill: to the page, from it to the pool, from it to the output."""

    def run() -> float:
        def copies() -> None:
            page = pages.take()
            page[:] = source
            pool[:] = page
            outputs.take()[:] = page

        return timed(copies, time.process_time)

    return run


def one_copy(source: Rows, outputs: Destinations, clock: Seconds = time.process_time) -> Seconds:
    """One plain copy."""

    def run() -> float:
        def copy() -> None:
            outputs.take()[:] = source

        return timed(copy, clock)

    return run
