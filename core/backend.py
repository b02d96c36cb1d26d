"""The device-backend interface: all that the core knows of an accelerator.

A backend is a class registered under the entry-point group `slotmirror.backends`; the name of its
entry point equals its `name`. To add one: subclass `DeviceBackend`, implement the abstract
members, and run the conformance kit. Members that are not abstract have correct defaults.

What holds for every member unless its text says otherwise: any thread may call it once it has
called `bind_thread`; it takes none of the core's locks and is never called under one; it does not
block; a failure of the device raises and leaves the arguments as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.core.errors import NotSupported

API_VERSION = 1
"""The version of this interface; a backend states the one it was written for."""

Stream: TypeAlias = object
"""A queue of device work; only its backend looks inside."""

HostRows: TypeAlias = npt.NDArray[np.void]
"""Rows in contiguous host memory as opaque items: shape `(rows,)`, `itemsize` the bytes of a row.

The dtype never chooses the kernel: moving bf16 rows as bf16 runs at a fraction of memory speed,
as fixed-size opaque items every dtype moves like a plain copy (backends spec, section 3).
"""

CopyPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""What a copy reads on the device, and where it writes it."""

SlotIndex: TypeAlias = npt.NDArray[np.int64]
"""Row numbers, shape `(rows,)`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a backend found on this machine without opening a device."""

    available: bool
    reason: str
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares; each declaration is tested by the conformance kit.

    async_copy            `copy_to_host` returns before the bytes have arrived
    pinned_host           `alloc_host(pinned=True)` can page-lock
    max_pinned_bytes      the most that may be page-locked in all; None: no limit known. A cache
                          whose pages, bounce buffers and pinned pool need more is refused
    host_alignment_bytes  alignment of every host buffer's address
    device_copies         `copy_to_device` works
    """

    async_copy: bool
    pinned_host: bool
    max_pinned_bytes: int | None = None
    host_alignment_bytes: int = 1
    device_copies: bool = False


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory, and of host memory that this backend has page-locked."""

    device_free_bytes: int
    device_total_bytes: int
    pinned_bytes: int


class Fence(ABC):
    """A point in a stream's work. Its owner records it again only after it was reached.

    A fence that was never recorded counts as reached.
    """

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Place the fence behind all work that is now in `stream`."""

    @abstractmethod
    def wait_on(self, stream: Stream) -> None:
        """Let later work of `stream` wait for this fence; the calling thread goes on."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the fence has been reached. Must not disturb a graph capture elsewhere."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block the calling thread until the fence is reached; False after `timeout_s` seconds.

        Raises whatever the device reports for work before the fence.
        """


class HostBuffer(ABC):
    """Contiguous host memory, held until `close`."""

    tensor: torch.Tensor
    """The memory, in the shape and dtype that were asked for."""
    pinned: bool
    """Whether it was really page-locked."""
    reserved_bytes: int
    """What it really took, rounding included."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; harmless when repeated. No copy may still use it."""


class DeviceBackend(ABC):
    """One kind of device, and one device of it."""

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    device_type: ClassVar[str]
    """The torch device type that it serves; two backends may serve the same."""
    automatic: ClassVar[bool] = False
    """Whether the automatic choice may take it."""
    accelerator: ClassVar[bool] = True
    """Whether the automatic choice prefers it to a host backend."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Serve `device`, or the calling thread's current device of this type."""
        self.device = device if device is not None else torch.device(self.device_type)

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Whether this machine can be served, and why not.

        Never raises, opens no device context, and imports no vendor runtime that could break the
        process.
        """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do; constant for its life."""

    @abstractmethod
    def bind_thread(self, device: torch.device) -> None:
        """Make `device` current in the calling thread. Every thread calls it before the rest."""

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies where `snapshot` and `copy_to_host` can read it.

        The core's only question about where a tensor lies; others are plain host tensors to it.
        """

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which the calling thread's engine issues its work."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """A stream of our own. The core makes a few, once, and keeps them."""

    @abstractmethod
    def new_fence(self) -> Fence:
        """A fence. Each page owns one for life."""

    @abstractmethod
    def alloc_host(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        """Contiguous host memory of `shape`, aligned, page-locked where asked and possible.

        May block on the allocation. Raises `MemoryError` when there is none.
        """

    @abstractmethod
    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies in device memory, ordered on the current stream.

        After it returns the engine may issue work that overwrites the originals.
        """

    @abstractmethod
    def copy_to_host(
        self, pairs: Sequence[CopyPair], stream: Stream, after: Stream, fence: Fence
    ) -> None:
        """Copy every (source, destination) pair on `stream`, once `after`'s present work is done.

        Then records `fence` on `stream`. Destinations are contiguous views of `alloc_host` memory
        with the source's shape and dtype; sources may be strided. The core keeps sources and
        destinations alive until the fence is reached. Blocks only without `async_copy`.
        """

    def gather_slots(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        """`out[i] = pool[slots[i]]`. Host memory only; slots in range, checked by the caller.

        Releases the GIL while it moves rows.
        """
        # mode="clip" is the only mode in which take() writes into `out` without a buffer between.
        np.take(pool, slots, out=out, mode="clip")

    def scatter_slots(self, pool: HostRows, slots: SlotIndex, rows: HostRows) -> None:
        """`pool[slots[i]] = rows[i]`; of duplicate slots the last row stays (H4).

        Host memory only; slots in range, checked by the caller. Releases the GIL.
        """
        pool[slots] = rows

    def copy_to_device(self, source: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, Fence]:
        """A device copy of the host tensor `source`, and the fence behind it.

        Optional: raises `NotSupported` unless `device_copies` is declared. The caller holds
        `source` until the fence is reached.
        """
        raise NotSupported(f"backend {self.name!r} does not declare device_copies")

    def is_lost(self) -> bool:
        """Whether the device has ended, and none of its queues will ever touch memory again.

        True only where that is certain: host memory that a copy may still write to is kept for
        ever otherwise.
        """
        return False

    def memory_info(self) -> MemoryInfo:
        """Device and page-locked bytes; zeros where the backend cannot tell."""
        return MemoryInfo(device_free_bytes=0, device_total_bytes=0, pinned_bytes=0)
