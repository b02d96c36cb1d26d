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


class LeftoverPack:
    """The leftovers of one step: their structures, with tensors of the engine's in them at first,
    then with their copies in the arena.
    """

    def __init__(self, leftovers: Mapping[str, object]) -> None:
        """Rebuild the structures; containers and arrays are copied, other values shared."""
        self.num_bytes = 0
        """Bytes of arena that the tensors take; 0 if there is none, even an empty one."""
        self._structures = dict(leftovers)
        self._structures = self._with(self._taken)

    def _taken(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            self.num_bytes += _arena_bytes(leaf)
            return leaf.detach()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    def copies_into(self, arena: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (source, destination) pairs to copy; `arena` is uint8 of `num_bytes`.

        Forgets the sources: from now on the pack speaks of the arena alone.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0

        def moved(leaf: object) -> object:
            nonlocal start
            if not isinstance(leaf, torch.Tensor):
                return leaf
            place = arena[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            start += _arena_bytes(leaf)
            pairs.append((leaf, place))
            return place

        self._structures = self._with(moved)
        return pairs

    def unpack(self) -> dict[str, object]:
        """The leftovers in memory of their own; the copies must have arrived."""
        return self._with(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)

    def _with(self, leaf: Callable[[object], object]) -> dict[str, object]:
        return {name: _rebuilt(value, leaf) for name, value in self._structures.items()}


def _arena_bytes(tensor: torch.Tensor) -> int:
    return (tensor.nbytes // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES


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
