"""Deferred rows: the one open batch, and the device bytes that its clones may take (W2, W4).

Rows of a deferred key stay on the device, one clone per step and key, in one open batch for all
requests in engine order. The batch is closed, and appended to the log as one write, when a
request with rows in it ends or is preempted, when a hit needs one of its rows, at half the budget,
and at shutdown. A closed batch never grows.

A claim of a slot kills its row in the open batch: nobody can want it any more (H4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.events import Int64Array, StepEvents
from slotmirror.core.oplog import OpLog, logger
from slotmirror.core.stats import CacheStats

_NOT_OPEN = -1


@dataclass(slots=True, eq=False)
class DeferredBatch:
    """Some steps' deferred rows.

    slots   per step the slot of each of its rows, (n,); once closed, -1 for rows that are dead
    clones  key → per step that had it, the step's place in `slots` and the device clone (n, …)
    """

    slots: list[Int64Array] = field(default_factory=list)
    clones: dict[OpenKey, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    req_ids: set[str] = field(default_factory=set)
    num_bytes: int = 0


class DeferredRows:
    """The open batch. The manager lock covers every method."""

    def __init__(self, num_slots: int, stats: CacheStats) -> None:
        self._batch = DeferredBatch()
        self._stats = stats
        # Place in the batch of the step whose row a slot waits for, or _NOT_OPEN.
        self._open_step = np.full(num_slots, _NOT_OPEN, dtype=np.int64)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the open batch."""
        return self._batch.num_bytes

    def reason_to_close(self, events: StepEvents, hit_slots: Int64Array) -> str | None:
        """Why this step's events close the batch, which is not empty; None if they do not."""
        if not self._batch.req_ids.isdisjoint(events.ended_generations):
            return "ended"
        if not self._batch.req_ids.isdisjoint(events.preempted):
            return "preempted"
        if (self._open_step[hit_slots] != _NOT_OPEN).any():
            return "hit"
        return None

    def kill(self, slots: Int64Array) -> None:
        """These slots were claimed: their open rows are dead."""
        self._open_step[slots] = _NOT_OPEN

    def add(
        self, clones: Mapping[OpenKey, torch.Tensor], slots: Int64Array, req_ids: Sequence[str]
    ) -> None:
        """A step's clones, each `(len(slots), …)`; their bytes are reserved already."""
        batch, place = self._batch, len(self._batch.slots)
        self._open_step[slots] = place
        batch.slots.append(slots)
        for key, clone in clones.items():
            batch.clones.setdefault(key, []).append((place, clone))
        batch.req_ids.update(req_ids)
        batch.num_bytes += sum(clone.nbytes for clone in clones.values())

    def close(self, reason: str) -> DeferredBatch:
        """Take the batch, which is not empty; the next one starts empty. `reason` is counted."""
        batch, self._batch = self._batch, DeferredBatch()
        alive = [
            np.where(self._open_step[slots] == place, slots, _NOT_OPEN)
            for place, slots in enumerate(batch.slots)
        ]
        self._open_step[np.concatenate(batch.slots)] = _NOT_OPEN
        batch.slots = alive
        closed = self._stats.batches_closed
        closed[reason] = closed.get(reason, 0) + 1
        return batch


class DeviceBudget:
    """Device bytes of deferred clones, from their reservation until their write is over (W4)."""

    def __init__(self, log: OpLog, bytes_max: int) -> None:
        self._log = log
        self._stats = log.stats
        self._bytes_max = bytes_max
        self.bytes_reserved = 0

    def reserve(self, num_bytes: int) -> None:
        """Reserve before cloning; waits, bounded, while the whole budget is taken (T1, W6).

        A single step that is larger than the whole budget is admitted alone, with a warning, which
        is repeated only for a yet larger one.
        Engine thread, without locks; what the open batch holds must have been closed before.
        """
        # A larger step than ever; one that is larger than the budget has set the mark alone.
        if num_bytes > max(self._bytes_max, self._stats.device_bytes_high):
            logger.warning(
                "a step's deferred rows take %d B, device_staging_bytes_max is %d: admitted alone",
                num_bytes,
                self._bytes_max,
            )
        if not self.fits(num_bytes):
            self._stats.device_budget_waits += 1
        self._log.wait_until(
            lambda: self.fits(num_bytes),
            f"{num_bytes} B of device budget (device_staging_bytes_max {self._bytes_max}, "
            f"{self.bytes_reserved} B taken)",
        )
        # Nobody else reserves: what fits goes on fitting.
        with self._log.lock:
            self.bytes_reserved += num_bytes
        self._stats.device_bytes_high = max(self._stats.device_bytes_high, self.bytes_reserved)

    def fits(self, num_bytes: int) -> bool:
        """Whether `reserve` would not wait; a hint, since the mover may release meanwhile."""
        return not self.bytes_reserved or self.bytes_reserved + num_bytes <= self._bytes_max

    def release(self, num_bytes: int) -> None:
        """Give bytes back; takes the log lock and wakes a waiting save."""
        with self._log.changed:
            self.bytes_reserved -= num_bytes
            self._log.changed.notify_all()

    def is_half_full(self, num_bytes: int) -> bool:
        """Whether this many bytes are half of the budget."""
        return 2 * num_bytes >= self._bytes_max
