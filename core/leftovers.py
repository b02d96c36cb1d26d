"""Host copies of what is not cached: delivered with its own step, never cut (D7, D9).

A leftover may be a tensor, or lists, tuples, dictionaries and dataclasses with tensors inside. Its
tensors are copied to the page's arena with the step's other rows, under the same fence, and
copied out of it when the step is materialized.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch

_ALIGNMENT_BYTES = 64


class _Parked:
    """Stands in the structure for its tensor number `index`; no dataclass, which is a container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class LeftoverPack:
    """The leftovers of one step, taken apart into structure and tensors."""

    def __init__(self, leftovers: Mapping[str, object]) -> None:
        """Take the structures apart; containers and arrays are copied, other values shared."""
        self._tensors: list[torch.Tensor] = []
        self._structure = {name: _rebuilt(value, self._park) for name, value in leftovers.items()}
        self._offsets: list[int] = []
        end = 0
        for tensor in self._tensors:
            self._offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.has_tensors = bool(self._tensors)
        self.num_bytes = end
        """Bytes of arena that the tensors take."""
        self._parked: list[torch.Tensor] = []

    def _park(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            self._tensors.append(leaf.detach())
            return _Parked(len(self._tensors) - 1)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    def copies_into(self, arena: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (source, destination) pairs to copy; `arena` is uint8 of `num_bytes`.

        Forgets the sources: from now on the pack speaks of the arena alone.
        """
        sources, self._tensors = self._tensors, []
        self._parked = [
            arena[offset : offset + source.nbytes].view(source.dtype).view(source.shape)
            for source, offset in zip(sources, self._offsets, strict=True)
        ]
        return list(zip(sources, self._parked, strict=True))

    def unpack(self) -> dict[str, object]:
        """The leftovers in memory of their own; the copies must have arrived."""

        def unpark(leaf: object) -> object:
            return self._parked[leaf.index].clone() if isinstance(leaf, _Parked) else leaf

        return {name: _rebuilt(value, unpark) for name, value in self._structure.items()}


def _rebuilt(value: object, leaf: Callable[[object], object]) -> object:
    """The same nesting of fresh containers, with `leaf` applied to everything else."""
    if isinstance(value, dict):
        return {name: _rebuilt(item, leaf) for name, item in value.items()}
    if isinstance(value, list):
        return [_rebuilt(item, leaf) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # A shallow copy with rebuilt fields: frozen ones too, and without running __init__ again.
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            item = _rebuilt(getattr(value, field.name), leaf)
            object.__setattr__(copied, field.name, item)
        return copied
    if isinstance(value, tuple):
        items = [_rebuilt(item, leaf) for item in value]
        make = getattr(type(value), "_make", tuple)
        return make(items)
    return leaf(value)
