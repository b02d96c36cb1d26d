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
_TENSOR = object()


class LeftoverPack:
    """The leftovers of one step: their structures, and apart from them the tensors that were in
    them, the engine's at first, then their copies in the arena.
    """

    def __init__(self, leftovers: Mapping[str, object]) -> None:
        """Rebuild the structures; containers and arrays are copied, other values shared."""
        self._tensors: list[torch.Tensor] = []
        """In the order of the walk over the structures, where `_TENSOR` stands for each."""
        self._structures = {name: _rebuilt(v, self._taken) for name, v in leftovers.items()}
        self._sizes = [(t.nbytes // _ALIGNMENT_BYTES + 1) * _ALIGNMENT_BYTES for t in self._tensors]
        self.num_bytes = sum(self._sizes)
        """Bytes of arena that the tensors take; 0 if there is none, even an empty one."""

    def _taken(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            self._tensors.append(leaf.detach())
            return _TENSOR
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    def copies_into(self, arena: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The (source, destination) pairs to copy; `arena` is uint8 of `num_bytes`.

        Forgets the sources: from now on the pack speaks of the arena alone.
        """
        sources, parts = self._tensors, torch.split(arena, self._sizes)
        self._tensors = [
            part[: source.nbytes].view(source.dtype).view(source.shape)
            for part, source in zip(parts, sources, strict=True)
        ]
        return list(zip(sources, self._tensors, strict=True))

    def unpack(self) -> dict[str, object]:
        """The leftovers in memory of their own; the copies must have arrived."""
        copies = (tensor.clone() for tensor in self._tensors)
        return {
            name: _rebuilt(value, lambda leaf: next(copies) if leaf is _TENSOR else leaf)
            for name, value in self._structures.items()
        }


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
        # A named tuple takes its items one by one, unless it is made by `_make`.
        make = getattr(type(value), "_make", tuple)
        return make(_rebuilt(item, leaf) for item in value)
    return leaf(value)
