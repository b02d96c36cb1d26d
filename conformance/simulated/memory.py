"""Memory of the simulated device, and host memory that its copies may write.

Both are ordinary arrays that know who may use them. Device memory is handed out as CPU tensors;
when the last tensor on a piece dies the piece is poisoned *in the order of the stream it belongs
to*, as a caching allocator would hand it to the next kernel of that stream: a copy on another
stream that still reads it reads poison. Host memory is poisoned when it is made, when a copy into
it is launched, and when it is closed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slotmirror.conformance.simulated.streams import SimulatedStream
from slotmirror.core.backend import HostBuffer

_storage_if_alive: Callable[[int], torch.UntypedStorage | None]
_storage_if_alive = torch.UntypedStorage._new_with_weak_ptr

DEVICE_POISON = 0xDB
HOST_POISON = 0xA5

Bytes = npt.NDArray[np.uint8]


class Block:
    """A piece of device memory: its bytes outlive the tensors on it, as a device's do."""

    __slots__ = ("memory", "reused", "watch")

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.reused = False
        """Whether the memory was freed, and its stream has given it to somebody else."""
        self.watch: weakref.ref[Bytes] | None = None

    def give_away(self) -> None:
        """Its stream uses it for something else from now on."""
        self.memory.fill(DEVICE_POISON)
        self.reused = True


class RawRows:
    """A tensor's place in a block, without a lease on it: what queued work reads and writes."""

    __slots__ = ("_block", "_end", "_owner", "_start", "_strided")

    def __init__(self, block: Block, tensor: torch.Tensor) -> None:
        self._owner = block
        self._block = block.memory
        self._start = tensor.storage_offset() * tensor.itemsize
        self._end = self._start + tensor.nbytes
        self._strided: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None = None
        if not tensor.is_contiguous():
            self._strided = (tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def reused(self) -> bool:
        """Whether the memory belongs to somebody else by now."""
        return self._owner.reused

    def read(self) -> Bytes:
        """The bytes, in the order of the tensor's elements."""
        if self._strided is None:
            return self._block[self._start : self._end]
        dtype, shape, stride = self._strided
        usable = len(self._block) // dtype.itemsize * dtype.itemsize
        typed = torch.from_numpy(self._block[:usable]).view(dtype)
        rows = typed.as_strided(shape, stride, self._start // dtype.itemsize)
        packed: Bytes = rows.contiguous().view(-1).view(torch.uint8).numpy()
        return packed

    def write(self, values: Bytes) -> None:
        """Set the bytes; contiguous tensors only."""
        if self._strided is not None:
            raise ValueError("the simulated device writes contiguous tensors only")
        self._block[self._start : self._end] = values


class HostSource:
    """A host tensor that a copy to the device will read, without a lease on its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types for it
        self._dtype = tensor.dtype
        self._place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def read(self) -> Bytes | None:
        """The bytes, in the order of the tensor's elements; None if the memory was freed."""
        storage = _storage_if_alive(self._storage.cdata)
        if storage is None:
            return None
        rows = torch.empty(0, dtype=self._dtype).set_(storage, *self._place)
        packed: Bytes = rows.contiguous().view(-1).view(torch.uint8).numpy()
        return packed


class DeviceMemory:
    """Allocations of the device, by address. Any thread; finalisers take no lock."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, stream: SimulatedStream
    ) -> torch.Tensor:
        """A poisoned tensor that belongs to `stream`."""
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        memory = np.full(num_bytes, DEVICE_POISON, dtype=np.uint8)
        block = Block(memory)
        # Through a memoryview, so that the tensor's base is this array and not `memory` itself.
        handle: Bytes = np.frombuffer(memoryview(memory), dtype=np.uint8)  # type: ignore[arg-type]  # arrays are buffers since 3.12's typing
        tensor = torch.from_numpy(handle)
        address = tensor.data_ptr()

        def freed(_: object) -> None:
            self._blocks.pop(address, None)
            stream.append(block.give_away)

        block.watch = weakref.ref(handle, freed)
        self._blocks[address] = block
        return tensor[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def raw(self, tensor: torch.Tensor) -> RawRows:
        """The tensor's place, for work that must not keep its memory leased."""
        return RawRows(self._blocks[tensor.untyped_storage().data_ptr()], tensor)

    @property
    def live_bytes(self) -> int:
        """Bytes on which some tensor lives."""
        return sum(len(block.memory) for block in list(self._blocks.values()))


class SimulatedHostBuffer(HostBuffer):
    """Host memory, poisoned; `is_open` until `close`."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        pinned: bool,
        alignment: int,
        memory: Bytes,
        closed: Callable[[SimulatedHostBuffer], None],
    ) -> None:
        num_bytes = prod(shape) * dtype.itemsize
        start = -memory.ctypes.data % alignment
        self._bytes: Bytes = memory[start : start + num_bytes]
        self.tensor = torch.from_numpy(self._bytes).view(dtype).view(tuple(shape))
        self.pinned = pinned
        self.reserved_bytes = len(memory)
        self.address = self.tensor.data_ptr()
        self.is_open = True
        self._closed = closed

    def bytes_of(self, tensor: torch.Tensor) -> Bytes:
        """The bytes of a contiguous tensor in this buffer."""
        start = tensor.storage_offset() * tensor.itemsize
        return self._bytes[start : start + tensor.nbytes]

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._bytes.fill(HOST_POISON)
            self.tensor = torch.empty(0, dtype=self.tensor.dtype)
            self.reserved_bytes = 0
            self._closed(self)


@dataclass(frozen=True, slots=True)
class _OpenBuffer:
    """What is known of a buffer without keeping it: its memory ends with its last tensor."""

    buffer: weakref.ref[SimulatedHostBuffer]
    memory: weakref.ref[Bytes]
    num_bytes: int
    pinned: bool


class HostMemory:
    """Host buffers that are open, by address: not closed, and some tensor on them lives."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenBuffer] = {}

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, pinned: bool, alignment: int
    ) -> SimulatedHostBuffer:
        """A poisoned buffer."""
        num_bytes = prod(shape) * dtype.itemsize + alignment
        memory: Bytes = np.full(num_bytes, HOST_POISON, dtype=np.uint8)
        buffer = SimulatedHostBuffer(shape, dtype, pinned, alignment, memory, self._forget)
        address = buffer.address
        freed = weakref.ref(memory, lambda _: self._open.pop(address, None))
        self._open[address] = _OpenBuffer(weakref.ref(buffer), freed, num_bytes, pinned)
        return buffer

    def _forget(self, buffer: SimulatedHostBuffer) -> None:
        del self._open[buffer.address]

    def buffer_of(self, tensor: torch.Tensor) -> SimulatedHostBuffer | None:
        """The open buffer in which the tensor lies."""
        found = self._open.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found.buffer()

    @property
    def open_bytes(self) -> int:
        """Bytes of buffers that were not closed."""
        return sum(buffer.num_bytes for buffer in list(self._open.values()))

    @property
    def pinned_bytes(self) -> int:
        """Those of them that are page-locked."""
        return sum(b.num_bytes for b in list(self._open.values()) if b.pinned)
