"""The durable rows: for each key one host tensor with a row per KV slot (K3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slotmirror.core.backend import HostBuffer, HostRows
from slotmirror.core.host_rows import as_host_rows
from slotmirror.core.key_spec import KeySpec


class PageRows:
    """A key's rows on one page, as the tensor that copies write and as opaque rows.

    Whoever holds the page may use them; all holders want the same number of rows.
    """

    def __init__(self, buffer: HostBuffer) -> None:
        self._tensor = buffer.tensor
        self._rows = as_host_rows(buffer.tensor)
        self._cut = (len(self._rows), self._tensor, self._rows)

    def first(self, num_rows: int) -> tuple[torch.Tensor, HostRows]:
        """The first rows: `(num_rows, *trailing_shape)`, and the same as `(num_rows,)` items."""
        # Slicing a tensor costs a microsecond, and a decode batch asks for the same rows again.
        count, tensor, rows = self._cut
        if count != num_rows:
            tensor, rows = self._tensor[:num_rows], self._rows[:num_rows]
            self._cut = (num_rows, tensor, rows)
        return tensor, rows


@dataclass(frozen=True, slots=True, eq=False)
class OpenKey:
    """A key that has rows.

    index   its column in the slot table
    pool    its memory, `(num_slots, *trailing_shape)`; touched by the mover alone
    rows    the same as `(num_slots,)` opaque rows
    pages   its part of every staging page
    """

    spec: KeySpec
    index: int
    pool: HostBuffer
    rows: HostRows
    pages: tuple[PageRows, ...]

    @property
    def name(self) -> str:
        """The key's name."""
        return self.spec.name
