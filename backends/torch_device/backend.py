"""The base of all backends for torch devices.

It serves any device that torch drives with streams, events and page-locked memory. A subclass says
which one: `name`, `device_type`, its own `probe`, and in `_open` what its runtime adds. The base
is itself the backend `torch`, for XPU and PrivateUse1 devices that have no backend of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from slotmirror.backends.torch_device.device_api import DeviceStream, GenericApi
from slotmirror.backends.torch_device.fences import EventFence
from slotmirror.backends.torch_device.generic_probe import accelerator_type, probe_accelerator
from slotmirror.backends.torch_device.host_memory import (
    ALIGNMENT_BYTES,
    OrdinaryBuffer,
    PinnedBuffer,
    PinnedMeter,
    aligned_bytes,
)
from slotmirror.backends.torch_device.registered_memory import (
    REGISTERED_BYTES_MIN,
    RegisteredBuffer,
    RegisteredChunks,
)
from slotmirror.backends.torch_device.runtime import DeviceRuntime
from slotmirror.core.backend import (
    Capabilities,
    CopyPair,
    DeviceBackend,
    Fence,
    HostBuffer,
    MemoryInfo,
    Probe,
    Stream,
)
from slotmirror.core.errors import BackendUnavailable, UsageError

logger = logging.getLogger("slotmirror.backends")

_STREAMS_MAX = 4
"""torch gives out 32 streams in turn, to the engine too: who asks for more meets the engine's."""


class TorchDeviceBackend(DeviceBackend):
    """Asynchronous copies on streams of our own, into page-locked memory."""

    name = "torch"
    device_type = ""
    """Empty: whatever accelerator this torch has."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Open the vendor's runtime, and serve `device` or the thread's current device.

        Raises `BackendUnavailable` where there is no such device.
        """
        self._runtime = self._open()
        self._api = self._runtime.api
        kind = self.device_type or accelerator_type()
        if kind is None:
            raise BackendUnavailable(self.name, "this torch was built without an accelerator")
        if device is not None and device.type != kind:
            raise BackendUnavailable(self.name, f"it serves {kind} devices, not {device}")
        index = None if device is None else device.index
        super().__init__(torch.device(kind, self._api.current_device() if index is None else index))
        self._pinned = PinnedMeter()
        registration = self._runtime.registration
        self._chunks = None if registration is None else RegisteredChunks(registration)
        self._streams: list[DeviceStream] = []
        self._streams_given = 0
        self._streams_lock = threading.Lock()

    @classmethod
    def probe(cls) -> Probe:
        return probe_accelerator(cls.device_type)

    def _open(self) -> DeviceRuntime:
        """Import the vendor's runtime and say how it is driven; once, when it was chosen."""
        return DeviceRuntime(GenericApi())

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            async_copy=True,
            pinned_host=True,
            host_alignment_bytes=ALIGNMENT_BYTES,
            device_copies=True,
        )

    def bind_thread(self, device: torch.device) -> None:
        self._api.set_device(device)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def current_stream(self) -> Stream:
        """See the interface.

        Collective libraries work on streams of their own: what they produced is in the engine's
        stream only once the engine has let it wait for them, as it must before it reads them too.
        """
        return self._api.current_stream(self.device)

    def new_stream(self) -> Stream:
        """One of a few streams that are made once; further calls share them."""
        with self._streams_lock:
            turn = self._streams_given % _STREAMS_MAX
            self._streams_given += 1
            if turn == len(self._streams):
                self._streams.append(self._api.new_stream(self.device))
            return self._streams[turn]

    def new_fence(self) -> Fence:
        return self._new_fence()

    def alloc_host(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        """See the interface. Page-locked memory is taken at start-up, about 0.5 s per GiB.

        Where it cannot be page-locked it is ordinary memory, with a warning: copies into it hold
        the engine. Raises `UsageError` while this thread captures a graph.
        """
        if not pinned:
            return OrdinaryBuffer(shape, dtype)
        self._refuse_in_capture("allocate page-locked memory")
        try:
            with self._runtime.relaxed():
                return self._pinned_buffer(shape, dtype)
        except (RuntimeError, OSError, MemoryError) as error:
            logger.warning(
                "%d bytes could not be page-locked, copies will hold the engine: %s (limits: "
                "ulimit -l, the container's memory, the driver's registered memory)",
                aligned_bytes(shape, dtype),
                error,
            )
            return OrdinaryBuffer(shape, dtype)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._refuse_in_capture("save outputs")
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def copy_to_host(
        self,
        pairs: Sequence[CopyPair],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        copies, behind = _own(stream, fence)
        self._refuse_in_capture("copy outputs")
        copies.wait_stream(after)
        with self._api.use_stream(copies):
            for source, destination in pairs:
                given = source.detach()
                ready = _as_copied(given, destination)
                if ready is not given:
                    behind.keep(ready)
                for piece, place in self._pieces(ready, destination):
                    place.copy_(piece, non_blocking=True)
        behind.record(copies)

    def copy_to_device(self, source: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, Fence]:
        """See the interface. The caller's current stream owns the copy's memory.

        A consumer lets its stream wait for the fence; page-locked `source` makes it asynchronous.
        """
        fence = self._new_fence()
        copies, _ = _own(stream, fence)
        self._refuse_in_capture("copy rows to the device")
        target = torch.empty_like(
            source, device=self.device, memory_format=torch.contiguous_format, pin_memory=False
        )
        # The memory may have been freed a moment ago by work that the current stream still does.
        copies.wait_stream(self._api.current_stream(self.device))
        with self._api.use_stream(copies):
            target.copy_(source, non_blocking=True)
        fence.keep(target)
        fence.record(copies)
        return target, fence

    def memory_info(self) -> MemoryInfo:
        free, total = self._api.memory_info(self.device)
        return MemoryInfo(free, total, self._pinned.num_bytes)

    def _new_fence(self) -> EventFence:
        event = self._api.new_event(self.device)
        return EventFence(event, self._runtime.relaxed, self._runtime.wait)

    def _pinned_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> HostBuffer:
        if self._chunks is None or aligned_bytes(shape, dtype) < REGISTERED_BYTES_MIN:
            return PinnedBuffer(shape, dtype, self._pinned)
        return RegisteredBuffer(shape, dtype, self._pinned, self._chunks)

    def _pieces(self, source: torch.Tensor, destination: torch.Tensor) -> Sequence[CopyPair]:
        if self._chunks is None:
            return ((source, destination),)
        return self._chunks.cut(source, destination)

    def _refuse_in_capture(self, what: str) -> None:
        """Copies, clones and allocations must not become part of somebody's graph."""
        if self._api.is_capturing(self.device):
            raise UsageError(
                f"cannot {what} while this thread captures a graph: preallocate before it, "
                "and save no outputs of capture runs"
            )


def _own(stream: Stream, fence: Fence) -> tuple[DeviceStream, EventFence]:
    """The two as what they are; raises `TypeError` for those of another backend."""
    if not isinstance(fence, EventFence) or not hasattr(stream, "wait_stream"):
        raise TypeError(f"{stream!r} or {fence!r} is not of this backend")
    own: DeviceStream = stream
    return own, fence


def _as_copied(source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """`source` as the copy needs it: contiguous and of the destination's dtype.

    Both are done on the device: a copy that must also convert or gather goes through pageable
    memory and holds the engine (backends spec, section 3).
    """
    return source.to(destination.dtype).contiguous()
