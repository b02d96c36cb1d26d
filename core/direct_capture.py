"""Direct capture: long runs of slots go from the device straight into a page-locked pool.

A run of neighbouring slots is one copy, so above some length it beats page plus scatter; where
that length lies depends on the device (`slotmirror calibrate`). It is part of the step's write, so
it keeps its place in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend, Stream
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.errors import CopyAbandonedError
from slotmirror.core.events import Int64Array
from slotmirror.core.oplog import Mover
from slotmirror.core.own_stream import OwnStream
from slotmirror.core.stranded import keep_for_ever


@dataclass(frozen=True, slots=True, eq=False)
class SlotRuns:
    """A step's rows, split: `(row, slot, rows)` of each long run, and the rows of no long run."""

    runs: list[tuple[int, int, int]]
    rest: Int64Array

    @classmethod
    def of(cls, slots: Int64Array, rows_min: int) -> SlotRuns:
        """Runs of at least `rows_min` neighbouring slots; none where a slot occurs twice.

        Direct copies and the scatter of the rest run side by side, and of two rows for one slot
        the later must stay (H4).
        """
        if len(np.unique(slots)) < len(slots):
            return cls([], np.arange(len(slots), dtype=np.int64))
        heads = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1))
        lengths = np.diff(np.concatenate((heads, [len(slots)])))
        long = lengths >= rows_min
        runs = zip(heads[long].tolist(), slots[heads[long]].tolist(), lengths[long].tolist(),
                   strict=True)  # fmt: skip
        return cls(list(runs), np.flatnonzero(np.repeat(~long, lengths)))


class DirectCopier:
    """The stream and the fence of direct captures; the mover's, which has one under way at most."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.stream = OwnStream(backend)
        self.fence = backend.new_fence()
        self.abandoned = False
        """A copy into the pool was given up on, and may still run: the pool must stay."""


class DirectCapture:
    """The direct part of one write. Clones are held until its copies have run."""

    def __init__(
        self,
        copier: DirectCopier,
        after: Stream,
        clones: Mapping[OpenKey, torch.Tensor],
        slots: Int64Array,
        rows_min: int,
    ) -> None:
        self._copier = copier
        self._after = after
        self._launched = False
        self._runs = SlotRuns.of(slots, rows_min)
        self._pairs = [
            (clone[row : row + count], key.pool.tensor[slot : slot + count])
            for key, clone in clones.items()
            for row, slot, count in self._runs.runs
        ]

    @property
    def rest(self) -> Int64Array:
        """Rows of the step that still go by page and scatter."""
        return self._runs.rest

    @property
    def num_rows(self) -> int:
        """Rows copied directly, over all keys."""
        return sum(len(source) for source, _ in self._pairs)

    @property
    def may_run(self) -> bool:
        """Whether copies were launched and not seen to end."""
        return self._launched

    def abandon(self) -> None:
        """Nobody will see the copies end: what they read and write is kept for ever."""
        self._copier.abandoned = True
        keep_for_ever(self)

    def launch(self, mover: Mover) -> None:
        """Start the copies; `arrive` follows on every path."""
        if self._pairs:
            stream = self._copier.stream.get()
            self._launched = True
            try:
                mover.backend.copy_to_host(self._pairs, stream, self._after, self._copier.fence)
            except BaseException:
                # Part of the copies may run: put the fence behind them.
                self._copier.fence.record(stream)
                raise

    def arrive(self, mover: Mover) -> None:
        """Wait until the copies have run, then free the clones; see `PageHold.arrive`."""
        try:
            if self._launched:
                mover.wait_fence(self._copier.fence)
        except CopyAbandonedError:
            raise
        except Exception:
            self._pairs, self._launched = [], False
            raise
        self._pairs, self._launched = [], False
