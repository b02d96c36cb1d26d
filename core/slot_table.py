"""Which slot has whose row: one presence bit per slot and key (C2).

Pure bookkeeping: no tensor, no thread, no lock of its own (the manager lock covers it). Presence
means: a write of the slot's present owner is in the log, so a read that is appended now will find
its row. There are no versions and no per-slot sequence numbers; the log's order replaces them.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from slotmirror.core.events import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class SlotTable:
    """Presence of every slot's row, for every open key."""

    def __init__(self, num_slots: int) -> None:
        self.widen(np.zeros((num_slots, 4), dtype=np.bool_))
        self._step_row = np.full(num_slots, -1, dtype=np.int64)

    def room_for(self, key_index: int) -> BoolArray | None:
        """A wider table for `widen`, if this column needs one; engine thread, without the lock
        (T5).
        """
        if key_index < self._present.shape[1]:
            return None
        return np.concatenate((self._present, np.zeros_like(self._present)), axis=1)

    def widen(self, present: BoolArray) -> None:
        """Take over the table that `room_for` made; no slot has a row for the columns it adds."""
        self._present = present
        # A slot's bits as one opaque item: a claim clears, and a save sets, all keys at once.
        self._bits = present.view(np.dtype((np.void, present.shape[1])))[:, 0]
        self._bits_of: dict[tuple[int, ...], np.void] = {}

    def plan_hits(
        self, step_slots: Int64Array, hit_slots: Int64Array
    ) -> tuple[Int64Array, BoolArray]:
        """Where hit rows come from once `step_slots` are claimed; changes nothing.

        Both arrays in range. Returns the row of the step that writes each hit slot, or -1, since
        such a row lies on the step's own page (H1, H2); and, a column for each open key and some
        more, whether the pool has it.
        """
        self._step_row[step_slots] = np.arange(len(step_slots), dtype=np.int64)
        own_row = self._step_row[hit_slots]
        self._step_row[step_slots] = -1
        present = self._bits[hit_slots].view(np.bool_).reshape(len(hit_slots), -1)
        present[own_row >= 0] = False
        return own_row, present

    def claim(self, slots: Int64Array) -> None:
        """Slots that this step writes: absent for every key until its save (C2, C3, D6)."""
        self._bits[slots] = self._bits_with(())

    def mark_written(self, slots: Int64Array, key_indices: tuple[int, ...]) -> None:
        """A write of these keys to these slots is appended under the same hold of the lock."""
        self._bits[slots] = self._bits_with(key_indices)

    def _bits_with(self, key_indices: tuple[int, ...]) -> np.void:
        """The bits of a slot that has rows of exactly these keys."""
        bits = self._bits_of.get(key_indices)
        if bits is None:
            row = np.zeros(self._present.shape[1], dtype=np.bool_)
            row[list(key_indices)] = True
            bits = self._bits_of[key_indices] = row.view(self._bits.dtype)[0]
        return bits

    def clear(self) -> None:
        """Every slot absent for every key (R1)."""
        self._present[:] = False
