"""Page-locking of memory that exists already, in chunks, at its exact size (`pin_pool`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from slotmirror.backends.torch_device.host_memory import (
    PinnedMeter,
    aligned_bytes,
    host_bytes,
    mapped,
    shaped,
)
from slotmirror.core.backend import CopyPair, HostBuffer

REGISTERED_BYTES_MIN = 1 << 30
"""From here on memory is registered where the device can: exact size instead of a power of two."""

CHUNK_BYTES = 64 << 30
"""Page-locking happens in pieces of at most this size (backends spec, section 3)."""


class HostRegistration(Protocol):
    """Page-locks memory that exists already."""

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock it; raises if the driver refuses."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`; no copy may still use it."""
        ...


class RegisteredChunks:
    """Where the chunks of registered memory begin. Any thread, finalisers too: no lock."""

    def __init__(self, registration: HostRegistration, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._registration = registration
        self._chunk_bytes = chunk_bytes
        self._areas: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> Callable[[], object]:
        """Page-lock an area chunk by chunk; the returned function undoes it.

        Raises what the driver raises, with nothing left registered.
        """
        done: list[int] = []

        def undo() -> None:
            self._areas.pop(address, None)
            while done:
                self._registration.unregister(done.pop())

        try:
            for offset in range(0, num_bytes, self._chunk_bytes):
                length = min(self._chunk_bytes, num_bytes - offset)
                self._registration.register(address + offset, length)
                done.append(address + offset)
        except BaseException:
            undo()
            raise
        self._areas[address] = num_bytes
        return undo

    def cut(self, source: torch.Tensor, destination: torch.Tensor) -> list[CopyPair]:
        """The copy in pieces that cross no chunk's edge, which drivers refuse; mostly one piece.

        Both tensors are contiguous and of one dtype.
        """
        edges = self._edges_in(destination.data_ptr(), destination.nbytes)
        if not edges:
            return [(source, destination)]
        source_bytes = source.view(-1).view(torch.uint8)
        place = destination.view(-1).view(torch.uint8)
        spans = pairwise([0, *edges, destination.nbytes])
        return [(source_bytes[start:end], place[start:end]) for start, end in spans]

    def _edges_in(self, address: int, num_bytes: int) -> list[int]:
        """Offsets behind `address` at which a new chunk begins."""
        for start, length in list(self._areas.items()):
            if start <= address < start + length:
                first = self._chunk_bytes - (address - start) % self._chunk_bytes
                return list(range(first, num_bytes, self._chunk_bytes))
        return []


class RegisteredBuffer(HostBuffer):
    """Mapped memory, page-locked in chunks. Raises what the driver raises."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        meter: PinnedMeter,
        chunks: RegisteredChunks,
    ) -> None:
        pages = mapped(aligned_bytes(shape, dtype))
        undo = chunks.register(pages.ctypes.data, pages.nbytes)
        uncount = meter.count(pages.nbytes)

        def release() -> None:
            undo()
            uncount()

        # It runs before the pages are unmapped, since every view of them keeps them mapped.
        self._release = weakref.finalize(pages, release)
        self._release.atexit = False
        self.tensor = shaped(torch.from_numpy(pages), shape, dtype)
        self.pinned = True
        self.reserved_bytes = pages.nbytes

    def close(self) -> None:
        self._release()
        self.tensor = host_bytes(0).view(self.tensor.dtype)
        self.reserved_bytes = 0
