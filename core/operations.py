"""The operations of the log: write, gather, release.

They are made by the engine thread (a release by whoever discards a step), carried out by the
mover, and hold what they need until then. Letting go of a page always waits for the page's copy
first, on every path, errors included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slotmirror.core.backend import HostRows
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import Lease
from slotmirror.core.direct_capture import DirectCapture
from slotmirror.core.errors import without_tracebacks
from slotmirror.core.events import Int64Array
from slotmirror.core.oplog import Mover, Operation, logger
from slotmirror.core.staging import StagingPage
from slotmirror.core.stats import CacheStats
from slotmirror.core.write_task import TaskProgress, TaskState

LetGo = Callable[[StagingPage], None]
"""Drops one hold on a page; takes the log lock."""


class WriteTask(Operation):
    """This step's rows of every immediate key go from its page to their slots (W2).

    Holds the page; `slots[i]` is the slot of page row i. The step's consumer wakes the mover for
    it: the engine's thread has better things to do.
    """

    urgent = False

    def __init__(
        self,
        step_id: int,
        keys: tuple[OpenKey, ...],
        slots: Int64Array,
        page: StagingPage,
        let_go: LetGo,
        progress: TaskProgress,
        stats: CacheStats,
        direct: DirectCapture | None = None,
    ) -> None:
        self._step_id = step_id
        self._keys = keys
        self._slots = slots
        self._page = page
        self._let_go = let_go
        self.progress = progress
        self._stats = stats
        self._direct = direct

    def run(self, mover: Mover) -> None:
        self.progress.advance(TaskState.COPYING)
        try:
            if self._direct is not None:
                self._direct.launch(mover)
            self._page.arrive(mover)
            self.progress.advance(TaskState.HOST_READY)
            for key in self._keys:
                self._scatter(mover, key)
            self._stats.rows_written += len(self._slots) * len(self._keys)
            if self._direct is not None:
                self._stats.rows_captured_directly += self._direct.num_rows
                self._direct.arrive(mover)
            self.progress.advance(TaskState.WRITTEN)
        except BaseException:
            self.progress.fail()
            self._settle(mover)
            raise

    def _settle(self, mover: Mover) -> None:
        """The write failed: wait for copies that may still run, so that memory can be let go."""
        for part in (self._direct, self._page):
            try:
                if part is not None:
                    part.arrive(mover)
            except Exception as error:
                logger.error("a copy of a failed write failed too: %s", error)

    def _scatter(self, mover: Mover, key: OpenKey) -> None:
        """The key's rows from the page to their slots, without those captured directly."""
        _, rows = key.pages[self._page.index].first(len(self._slots))
        slots = self._slots
        if self._direct is not None:
            rows, slots = rows[self._direct.rest], slots[self._direct.rest]
        if len(slots):
            mover.backend.scatter_slots(key.rows, slots, rows)
        self._stats.bytes_written += len(self._slots) * rows.itemsize

    def drop(self, mover: Mover) -> None:
        self.progress.fail()
        self._page.arrive(mover)

    def let_go(self) -> None:
        if self._direct is not None and self._direct.may_run:
            self._direct.abandon()
        self._let_go(self._page)

    def state(self) -> str:
        return self.progress.state.value

    def describe(self) -> str:
        names = ",".join([key.name for key in self._keys])
        return f"write step {self._step_id}: {len(self._slots)} rows of {names}"


class GatherTask(Operation):
    """The pool's rows of one key, for all hits of a step, into one output buffer.

    `slots[i]` is the slot of output row i; rows in `zero_rows` are absent and read zeros (D6);
    `num_rows` of them are rows that somebody will see.
    A failure is kept for the step and poisons nothing (W5). The lease is held until it is over.
    """

    def __init__(
        self,
        step: str,
        key: OpenKey,
        slots: Int64Array,
        zero_rows: Int64Array,
        num_rows: int,
        lease: Lease,
        out: HostRows,
        stats: CacheStats,
    ) -> None:
        self._step = step
        self.key = key
        self._slots = slots
        self._zero_rows = zero_rows
        self._num_rows = num_rows
        self.lease: Lease = lease
        self._out = out
        self._stats = stats
        self.failure: BaseException | None = None

    def run(self, mover: Mover) -> None:
        try:
            mover.gather(self.key.rows, self._slots, self._out)
            if len(self._zero_rows):
                self._out[self._zero_rows] = np.zeros((), self._out.dtype)
            self._stats.rows_gathered += self._num_rows
            self._stats.bytes_gathered += self._num_rows * self.key.spec.row_bytes
        except Exception as error:
            self.failure = without_tracebacks(error)
            self._stats.gathers_failed += 1

    def drop(self, mover: Mover) -> None:
        self.failure = RuntimeError("the log had failed before this gather ran")

    def describe(self) -> str:
        return f"gather {self._step}: {self._num_rows} rows of {self.key.name}"


class ReleaseTask(Operation):
    """Whoever held a page gave up on it: the hold is dropped once its copy has run (S3)."""

    def __init__(self, whose: str, page: StagingPage, let_go: LetGo) -> None:
        self._whose = whose
        self._page = page
        self._let_go = let_go

    def run(self, mover: Mover) -> None:
        self._page.arrive(mover)

    def drop(self, mover: Mover) -> None:
        self._page.arrive(mover)

    def let_go(self) -> None:
        self._let_go(self._page)

    def describe(self) -> str:
        return f"release page {self._page.index} of {self._whose}"
