"""The operations of the log that move rows: writes into the pool, and gathers from it.

They are made by the engine thread, carried out by the mover, and hold what they need until then.
Letting go of memory always waits for a launched copy first, on every path, errors included.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import Lease, rows_view
from slotmirror.core.copy_target import CopyTarget
from slotmirror.core.direct_capture import DirectCapture
from slotmirror.core.errors import without_tracebacks
from slotmirror.core.events import Int64Array
from slotmirror.core.oplog import Mover, Operation, logger
from slotmirror.core.staging import StagingPage
from slotmirror.core.stats import CacheStats
from slotmirror.core.write_task import TaskProgress, TaskState


@dataclass(eq=False)
class PoolWrite(Operation):
    """Rows go from where device copies land to their slots.

    progress  how far it has come
    targets   where its copies land
    """

    progress: TaskProgress
    targets: Sequence[CopyTarget]
    stats: CacheStats

    @abstractmethod
    def move(self, mover: Mover) -> None:
        """Carry it out from `COPYING` to past `HOST_READY`."""

    def run(self, mover: Mover) -> None:
        self.progress.advance(TaskState.COPYING)
        try:
            self.move(mover)
            self.progress.advance(TaskState.WRITTEN)
        except BaseException:
            self.drop(mover)
            raise

    def drop(self, mover: Mover) -> None:
        """Move nothing more; wait for copies that may still run, so that memory can be let go."""
        self.progress.fail()
        for target in self.targets:
            try:
                target.arrive(mover)
            except Exception as error:
                logger.error(
                    "a copy into %s, of a failed write, failed too: %s", target.name, error
                )

    def state(self) -> str:
        return self.progress.state.value


@dataclass(eq=False)
class WriteTask(PoolWrite):
    """This step's rows of every immediate key go from its page to their slots (W2).

    Holds the page; `slots[i]` is the slot of page row i. The step's consumer wakes the mover for
    it: the engine's thread has better things to do.
    """

    urgent = False

    step_id: int
    keys: tuple[OpenKey, ...]
    slots: Int64Array
    page: StagingPage
    drop_hold: Callable[[StagingPage], None]
    direct: DirectCapture | None

    def move(self, mover: Mover) -> None:
        direct = self.direct
        if direct is not None:
            direct.launch()
        self.page.arrive(mover)
        self.progress.advance(TaskState.HOST_READY)
        # Rows that were captured directly are not scattered.
        slots = self.slots if direct is None else self.slots[direct.rest]
        for key in self.keys:
            _, rows = key.pages[self.page.index].first(len(self.slots))
            if len(slots):
                by_page = rows if direct is None else rows[direct.rest]
                mover.backend.scatter_slots(key.rows, slots, by_page)
            self.stats.bytes_written += len(self.slots) * rows.itemsize
        self.stats.rows_written += len(self.slots) * len(self.keys)
        if direct is not None:
            self.stats.rows_captured_directly += direct.num_rows
            direct.target.arrive(mover)

    def let_go(self) -> None:
        self.drop_hold(self.page)

    def describe(self) -> str:
        names = ",".join([key.name for key in self.keys])
        return f"write step {self.step_id}: {len(self.slots)} rows of {names}"


@dataclass(eq=False)
class GatherTask(Operation):
    """The pool's rows of one key, for all hits of a step, into one output buffer.

    `slots[i]` is the slot of output row i; rows in `zero_rows` are absent and read zeros (D6);
    `num_rows` of them are rows that somebody will see.
    A failure is kept for the step and poisons nothing (W5). The lease is held until it is over.
    """

    step: str
    key: OpenKey
    slots: Int64Array
    zero_rows: Int64Array
    num_rows: int
    lease: Lease
    stats: CacheStats
    failure: BaseException | None = None

    def run(self, mover: Mover) -> None:
        out = rows_view(self.lease, self.key.spec)[: len(self.slots)]
        try:
            mover.gather(self.key.rows, self.slots, out)
            out[self.zero_rows] = np.zeros((), out.dtype)
            self.stats.rows_gathered += self.num_rows
            self.stats.bytes_gathered += self.num_rows * self.key.spec.row_bytes
        except Exception as error:
            self.failure = without_tracebacks(error)
            self.stats.gathers_failed += 1

    def describe(self) -> str:
        return f"gather {self.step}: {self.num_rows} rows of {self.key.name}"
