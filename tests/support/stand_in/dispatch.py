"""torch's operations on device tensors, taken at the dispatcher and queued on streams.

A tensor is on the stand-in device if its memory is; to torch it is a CPU tensor. Operations that
only make views happen at once, the others are queued on the calling thread's stream; their results
are poisoned device memory until the queue gets there, as on a device.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from support.stand_in.device import StandInDevice

aten = torch.ops.aten


class StandInMode(TorchDispatchMode):
    """Active in every thread that uses the device."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is aten.is_pinned.default:
            return self._device.pinned.holds(args[0])
        if func is aten.empty.memory_format and kwargs.get("pin_memory"):
            return self._pinned(prod(args[0]) * kwargs["dtype"].itemsize)
        if func is aten.empty_like.default and kwargs.get("device") is not None:
            return self._device.memory.empty(args[0].shape, args[0].dtype, self._queue)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(self._device.memory.owns(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        if any(value.alias_info is not None for value in func._schema.returns):
            return func(*args, **kwargs)
        return self._computed(func, args, kwargs)

    @property
    def _queue(self):
        return self._device.current("any").queue

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        """As torch's allocator: the next power of two is taken."""
        taken = 1 << (num_bytes - 1).bit_length()
        self._device.allow_pinning(taken)
        return self._device.pinned.allocate(num_bytes, taken)

    def _raw(self, value: Any) -> Any:
        """Device tensors without their lease: the queue does not keep the program's memory."""
        if isinstance(value, torch.Tensor) and self._device.memory.owns(value):
            return self._device.memory.raw_view(value)
        return value

    def _in_place(self, func, args, kwargs):
        self._device.check_alive()
        if func is aten.copy_.default and self._fails(args[0]):
            raise RuntimeError("the copy could not be launched")
        raw_args, raw_kwargs = tree_map(self._raw, (tuple(args), kwargs))
        queue = self._queue
        self._device.enqueue(queue, lambda: func(*raw_args, **raw_kwargs))
        if func is aten.copy_.default and not self._is_asynchronous(args, kwargs):
            self._device.synchronous_copies += 1
            self._device.finish(queue)
        return args[0]

    def _fails(self, target: torch.Tensor) -> bool:
        """A failure that was asked for meets the next copy to the host."""
        if not self._device.fail_next_copy or self._device.memory.owns(target):
            return False
        self._device.fail_next_copy = False
        return True

    def _is_asynchronous(self, args, kwargs) -> bool:
        """Device to device always; to and from the host as the manuals say."""
        target, source = args[:2]
        owns = self._device.memory.owns
        if owns(target) and owns(source):
            return True
        host = source if owns(target) else target
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        same = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        return bool(non_blocking) and same and self._device.pinned.holds(host)

    def _computed(self, func, args, kwargs):
        self._device.check_alive()
        raw_args, raw_kwargs = tree_map(self._raw, (tuple(args), kwargs))
        with _disable_current_modes():
            shape_of = func(*raw_args, **raw_kwargs)
        queue = self._queue
        result = self._device.memory.empty(shape_of.shape, shape_of.dtype, queue)
        target = self._device.memory.raw_view(result)
        self._device.enqueue(queue, lambda: target.copy_(func(*raw_args, **raw_kwargs)))
        return result
