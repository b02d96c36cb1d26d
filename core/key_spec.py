"""What the rows of one key look like."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

HIDDEN_KEY = "__hidden_states__"
"""The key under which the stage's hidden states are kept; no model may use it for its own."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One per-token output: its name and the layout of one row.

    `trailing_shape` is the shape without the token dimension, in elements.
    """

    name: str
    trailing_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.trailing_shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> KeySpec:
        """The layout of `tensor`'s rows; its first dimension counts tokens."""
        return cls(name, tuple(tensor.shape[1:]), tensor.dtype)

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.trailing_shape))
        return f"{self.name}: ({shape}) {str(self.dtype).removeprefix('torch.')}"
