"""Paged KV rows: one row per slot, `num_blocks` blocks of `block_size` slots, reached by slot.

The slot of position p is `table[p // block_size] * block_size + p % block_size`
(stage-cache spec, K3).
"""

import numpy as np
import torch

from slotmirror.engine.models.base import Int64Array


class PagedKV:
    """Rows of any shape and type on one device, indexed by slot. Not thread-safe.

    Starts as zeros: masked attention still multiplies the values of unused slots.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._rows = torch.zeros((num_blocks * block_size, *row_shape), dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows` (n, *row_shape) at int64 `slots` (n,)."""
        self._rows.index_copy_(0, slots, rows)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows at int64 `slots` of any shape: (*slots.shape, *row_shape)."""
        flat = self._rows.index_select(0, slots.reshape(-1))
        return flat.reshape(*slots.shape, *self._rows.shape[1:])


def slots_at(block_tables: Int64Array, positions: Int64Array, block_size: int) -> Int64Array:
    """int64 (r,): the slot of `positions[i]` (r,) in row i of `block_tables` (r, width)."""
    blocks = block_tables[np.arange(len(positions)), positions // block_size]
    return blocks * block_size + positions % block_size


def context_slots(block_tables: Int64Array, num_positions: int, block_size: int) -> Int64Array:
    """int64 (r, num_positions): the slots of positions 0 .. num_positions - 1 of every table."""
    blocks = block_tables[:, : -(-num_positions // block_size), None]
    slots = (blocks * block_size + np.arange(block_size)).reshape(len(block_tables), -1)
    return slots[:, :num_positions]
