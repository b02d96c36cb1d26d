"""The operations of the log: write, gather, release.

They are made by the engine thread (a release by whoever discards a step), carried out by the
mover, and hold what they need until then: pages, leases, device clones. Letting go of a page
always waits for the page's copy first, on every path, errors included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.core.backend import HostRows
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import Lease
from slotmirror.core.direct_capture import DirectCapture
from slotmirror.core.errors import CopyAbandonedError, without_tracebacks
from slotmirror.core.events import Int64Array
from slotmirror.core.oplog import Mover, Operation, logger
from slotmirror.core.staging import StagingPage
from slotmirror.core.stats import CacheStats
from slotmirror.core.stranded import keep_for_ever
from slotmirror.core.write_task import TaskProgress, TaskState

LetGo = Callable[[StagingPage], None]
"""Drops one hold on a page; takes the log lock."""


@dataclass(slots=True, eq=False)
class PageHold:
    """One hold on a page whose copy may still run, with the clones that the copy reads.

    `launched` is false when no copy into the page was ever issued; its fence is then not waited
    for, since it belongs to the page's former use.
    """

    page: StagingPage
    let_go: LetGo
    clones: tuple[torch.Tensor, ...] = ()
    launched: bool = True
    _landed: bool = False

    def arrive(self, mover: Mover) -> None:
        """Wait until the page's copy has run, then free the clones.

        A copy that failed has ended too. One that a shutdown gave up on may still write some day,
        and an interrupt of this thread says nothing about the copy at all.
        """
        try:
            if self.launched:
                mover.wait_fence(self.page.fence)
            self._landed = True
        except CopyAbandonedError:
            raise
        except Exception:
            self._landed = True
            raise
        except BaseException:
            mover.wait_fence(self.page.fence)
            self._landed = True
            raise
        finally:
            if self._landed:
                self.clones = ()

    def release(self) -> None:
        """Drop the hold. Page and clones of a copy that may still run are kept for ever."""
        if self._landed:
            self.let_go(self.page)
        else:
            keep_for_ever(self.page, self.clones)


class WriteTask(Operation):
    """This step's rows of every immediate key go from its page to their slots (W2)."""

    def __init__(
        self,
        step_id: int,
        keys: tuple[OpenKey, ...],
        slots: Int64Array,
        hold: PageHold,
        progress: TaskProgress,
        stats: CacheStats,
        direct: DirectCapture | None = None,
    ) -> None:
        self._direct = direct
        self._step_id = step_id
        self._keys = keys
        self._slots = slots
        self._hold = hold
        self.progress = progress
        self._stats = stats

    def run(self, mover: Mover) -> None:
        self.progress.advance(TaskState.COPYING)
        try:
            if self._direct is not None:
                self._direct.launch(mover)
            self._hold.arrive(mover)
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
        for part in (self._direct, self._hold):
            try:
                if part is not None:
                    part.arrive(mover)
            except Exception as error:
                logger.error("a copy of a failed write failed too: %s", error)

    def _scatter(self, mover: Mover, key: OpenKey) -> None:
        """The key's rows from the page to their slots, without those captured directly."""
        rows, slots = self._hold.page.rows(key.spec.name, len(self._slots)), self._slots
        if self._direct is not None:
            rows, slots = rows[self._direct.rest], slots[self._direct.rest]
        if len(slots):
            mover.backend.scatter_slots(key.rows, slots, rows)
        self._stats.bytes_written += len(self._slots) * key.spec.row_bytes

    def drop(self, mover: Mover) -> None:
        self.progress.fail()
        self._hold.arrive(mover)

    def let_go(self) -> None:
        if self._direct is not None and self._direct.may_run:
            keep_for_ever(self)
        self._hold.release()

    def state(self) -> str:
        return self.progress.state.value

    def describe(self) -> str:
        names = ",".join(key.spec.name for key in self._keys)
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
        return f"gather {self._step}: {self._num_rows} rows of {self.key.spec.name}"


class ReleaseTask(Operation):
    """A discarded step lets go of its page, once its copy has run (S3)."""

    def __init__(self, step: str, hold: PageHold) -> None:
        self._step = step
        self._hold = hold

    def run(self, mover: Mover) -> None:
        self._hold.arrive(mover)

    def drop(self, mover: Mover) -> None:
        self._hold.arrive(mover)

    def let_go(self) -> None:
        self._hold.release()

    def describe(self) -> str:
        return f"release page {self._hold.page.index} of {self._step}"
