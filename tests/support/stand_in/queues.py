"""The stand-in's streams and memory: queues that move when stepped, bytes that do not stay."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod

import numpy as np
import torch

POISON = 0xDB


class Queue:
    """A stream's work in order; `append` is atomic, so finalisers may use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: deque[tuple[Callable[[], None], Callable[[], bool]]] = deque()

    def __len__(self) -> int:
        return len(self._work)

    def append(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        """Queue a piece of work; it is not run before `ready()`."""
        self._work.append((run, ready))

    @property
    def steppable(self) -> bool:
        return bool(self._work) and self._work[0][1]()

    def step(self) -> None:
        run, _ = self._work.popleft()
        run()


class Memory:
    """Device memory, handed out as CPU tensors and found again by address.

    Memory whose last tensor died is poisoned in the order of the stream that it belongs to, as a
    caching allocator would give it to that stream's next kernel.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[torch.Tensor, weakref.ref[np.ndarray]]] = {}

    def empty(self, shape, dtype: torch.dtype, queue: Queue) -> torch.Tensor:
        """A poisoned tensor that belongs to `queue`."""
        num_bytes = prod(shape) * dtype.itemsize
        memory = np.full(max(num_bytes, 16), POISON, dtype=np.uint8)
        # Through a memoryview, so that tensors keep the lease alive and not `memory` itself.
        lease = np.frombuffer(memoryview(memory), dtype=np.uint8)
        address = memory.ctypes.data

        def freed(_: object) -> None:
            self._live.pop(address, None)
            queue.append(lambda: memory.fill(POISON))

        self._live[address] = (torch.from_numpy(memory), weakref.ref(lease, freed))
        return torch.from_numpy(lease)[:num_bytes].view(dtype).view(tuple(shape))

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._live

    def raw_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes, shape and strides, without the lease."""
        raw, _ = self._live[tensor.untyped_storage().data_ptr()]
        usable = len(raw) // tensor.itemsize * tensor.itemsize
        typed = raw[:usable].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @property
    def live_bytes(self) -> int:
        return sum(len(raw) for raw, _ in list(self._live.values()))


class PinnedMemory:
    """Page-locked host memory, as torch's allocator gives it, found again by address."""

    def __init__(self) -> None:
        self._allocated: dict[int, int] = {}
        self.registered: dict[int, int] = {}

    def allocate(self, num_bytes: int, taken: int) -> torch.Tensor:
        """`num_bytes` of memory, aligned to a page, for which `taken` were page-locked."""
        room = np.zeros(num_bytes + 4096, dtype=np.uint8)
        start = -room.ctypes.data % 4096
        memory = room[start : start + num_bytes]
        address = memory.ctypes.data
        self._allocated[address] = taken
        weakref.finalize(memory, self._allocated.pop, address, None).atexit = False
        return torch.from_numpy(memory)

    @property
    def num_bytes(self) -> int:
        return sum(self._allocated.values()) + sum(self.registered.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return tensor.untyped_storage().data_ptr() in self._allocated or any(
            first <= address < first + length for first, length in self.registered.items()
        )
