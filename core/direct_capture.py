"""Direct capture: long runs of slots go from the device straight into a page-locked pool.

A run of neighbouring slots is one copy, so above some length it beats page plus scatter; where
that length lies depends on the device (`slotmirror calibrate`). It is part of the step's write, so
it keeps its place in the log.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from slotmirror.core.backend import Stream
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.copy_target import CopyTarget
from slotmirror.core.events import Int64Array


def long_runs(slots: Int64Array, rows_min: int) -> tuple[list[tuple[int, int, int]], Int64Array]:
    """A step's rows, split: `(row, slot, rows)` of each long run, and the rows of no long run.

    Runs of at least `rows_min` neighbouring slots; none where a slot occurs twice: direct copies
    and the scatter of the rest run side by side, and of two rows for one slot the later must stay
    (H4).
    """
    if len(np.unique(slots)) < len(slots):
        return [], np.arange(len(slots), dtype=np.int64)
    heads = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1))
    lengths = np.diff(np.concatenate((heads, [len(slots)])))
    long = lengths >= rows_min
    runs = zip(heads[long].tolist(), slots[heads[long]].tolist(), lengths[long].tolist(),
               strict=True)  # fmt: skip
    return list(runs), np.flatnonzero(np.repeat(~long, lengths))


class DirectCapture:
    """The direct part of one write; the mover has one under way at most.

    target    the pool
    rest      rows of the step that still go by page and scatter
    num_rows  rows copied directly, over all keys
    """

    def __init__(
        self,
        target: CopyTarget,
        streams: tuple[Stream, Stream],
        clones: Mapping[OpenKey, torch.Tensor],
        slots: Int64Array,
        rows_min: int,
    ) -> None:
        """`streams` are that of the copies, and the one whose present work they wait for."""
        self.target = target
        self._streams = streams
        runs, self.rest = long_runs(slots, rows_min)
        self._pairs = [
            (clone[row : row + count], key.pool.tensor[slot : slot + count])
            for key, clone in clones.items()
            for row, slot, count in runs
        ]
        self.num_rows = sum(len(source) for source, _ in self._pairs)

    def launch(self) -> None:
        """Start the copies; `target.arrive` follows on every path."""
        self.target.launch(self._pairs, *self._streams)
