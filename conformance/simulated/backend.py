"""The simulated device as a backend, named `simulated`; chosen only by name.

Beside the interface it has what an engine on such a device needs (`empty`, `upload`, `overwrite`,
`engine_stream`), and what a test needs (`faults`, `violations`, `live_device_bytes`).
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slotmirror.conformance.simulated.faults import FaultKind, FaultPlan, again
from slotmirror.conformance.simulated.memory import (
    HOST_POISON,
    Bytes,
    DeviceMemory,
    HostMemory,
    HostSource,
    RawRows,
    SimulatedHostBuffer,
)
from slotmirror.conformance.simulated.pacing import Pacing, SelfPaced
from slotmirror.conformance.simulated.profiles import PROFILES, Profile
from slotmirror.conformance.simulated.streams import SimulatedFence, SimulatedStream
from slotmirror.core.backend import (
    Capabilities,
    CopyPair,
    DeviceBackend,
    Fence,
    HostBuffer,
    HostRows,
    MemoryInfo,
    Probe,
    SlotIndex,
    Stream,
)


class SimulatedBackend(DeviceBackend):
    """See the package's text.

    `pacing` moves the queues; by default whoever waits does, in an order drawn from `seed`.
    """

    name = "simulated"
    device_type = "cpu"

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        profile: Profile = PROFILES["plain"],
        pacing: Pacing | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(device)
        self.profile = profile
        self.faults = FaultPlan()
        self.violations: list[str] = []
        """What broke the backend's contract, in order; empty for a correct core."""
        self._memory = DeviceMemory()
        self._host = HostMemory()
        self._rng = random.Random(seed)
        self.streams: list[SimulatedStream] = []
        self.engine_stream = self._new_stream("engine")
        self._pacing = pacing or SelfPaced(self.advance)
        self._lost: BaseException | None = None
        self._bound = {threading.get_ident(): self.engine_stream}

    # -- the interface ----------------------------------------------------------------------

    @classmethod
    def probe(cls) -> Probe:
        return Probe(
            available=True,
            reason="simulated in the host's memory; for tests",
            devices=("simulated",),
            versions={"torch": str(torch.__version__)},
        )

    @property
    def capabilities(self) -> Capabilities:
        profile = self.profile
        return Capabilities(
            async_copy=profile.async_copy,
            pinned_host=profile.pinned_host,
            host_alignment_bytes=profile.host_alignment_bytes,
            device_copies=profile.device_copies,
        )

    def bind_thread(self, device: torch.device) -> None:
        thread = threading.get_ident()
        if thread not in self._bound:
            self._bound[thread] = self._new_stream(f"default of thread {len(self._bound)}")
        self._pacing.call("bind_thread")
        self.faults.raise_if_due(FaultKind.BIND)

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._memory.owns(tensor)

    def current_stream(self) -> Stream:
        self._enter("current_stream")
        return self._bound.get(threading.get_ident(), self.engine_stream)

    def new_stream(self) -> Stream:
        self._enter("new_stream")
        return self._new_stream(str(len(self.streams)))

    def new_fence(self) -> Fence:
        self._enter("new_fence")
        return SimulatedFence(self)

    def alloc_host(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        self._enter("alloc_host")
        self.faults.raise_if_due(FaultKind.ALLOCATION)
        got = pinned and self.profile.pinned_host
        return self._host.allocate(shape, dtype, got, self.profile.host_alignment_bytes)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._enter("snapshot")
        self.faults.raise_if_due(FaultKind.SNAPSHOT)
        stream = self._bound.get(threading.get_ident(), self.engine_stream)
        return [self._cloned(tensor, stream) for tensor in tensors]

    def copy_to_host(
        self, pairs: Sequence[CopyPair], stream: Stream, after: Stream, fence: Fence
    ) -> None:
        self._enter("copy_to_host")
        if not (
            isinstance(stream, SimulatedStream)
            and isinstance(after, SimulatedStream)
            and isinstance(fence, SimulatedFence)
        ):
            raise TypeError("a stream or fence of another device")
        error = self.faults.meet(FaultKind.COPY_LAUNCH)
        behind = SimulatedFence(self)
        behind.place(after)
        behind.hold_back(stream)
        queued = pairs if error is None else pairs[: self._rng.randrange(len(pairs) + 1)]
        for source, destination in queued:
            self._queue_copy(source, destination, stream)
        if error is None:
            self.faults.raise_if_due(FaultKind.EVENT_RECORD)
            fence.place(stream)
            if not self.profile.async_copy:
                self._finish(stream)
            return
        raise error

    def gather_slots(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        out.view("u1")[:] = HOST_POISON
        self._enter("gather_slots")
        self.faults.raise_if_due(FaultKind.POOL_READ)
        out[:] = pool[slots]

    def scatter_slots(self, pool: HostRows, slots: SlotIndex, rows: HostRows) -> None:
        self._enter("scatter_slots")
        self.faults.raise_if_due(FaultKind.POOL_WRITE)
        pool[slots] = rows

    def copy_to_device(self, source: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, Fence]:
        if not self.profile.device_copies:
            return super().copy_to_device(source, stream)
        self._enter("copy_to_device")
        if not isinstance(stream, SimulatedStream):
            raise TypeError("a stream of another device")
        self.faults.raise_if_due(FaultKind.DEVICE_COPY)
        target = self._memory.empty(source.shape, source.dtype, stream)
        raw, rows = self._memory.raw(target), HostSource(source)
        stream.append(lambda: self._copy_back(rows, raw))
        fence = SimulatedFence(self)
        fence.place(stream)
        if not self.profile.async_copy:
            self._finish(stream)
        return target, fence

    def memory_info(self) -> MemoryInfo:
        live = self._memory.live_bytes
        return MemoryInfo(
            device_free_bytes=0, device_total_bytes=live, pinned_bytes=self._host.pinned_bytes
        )

    # -- for engines ------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A device tensor, poisoned; it belongs to the engine's stream."""
        return self._memory.empty(shape, dtype, self.engine_stream)

    def overwrite(self, tensor: torch.Tensor, values: Bytes) -> None:
        """Queue a kernel on the engine's stream that sets a contiguous device tensor's bytes.

        `values` may have any shape; it is read when the kernel runs.
        """
        raw, flat = self._memory.raw(tensor), values.reshape(-1)
        self.engine_stream.append(lambda: raw.write(flat))

    def fill(self, tensor: torch.Tensor, byte: int) -> None:
        """Queue a kernel on the engine's stream that sets every byte of a contiguous tensor."""
        self.overwrite(tensor, np.full(tensor.nbytes, byte, dtype=np.uint8))

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor that the engine's stream will fill with `values`."""
        tensor = self.empty(values.shape, values.dtype)
        packed = torch.empty(values.shape, dtype=values.dtype).copy_(values)
        self.overwrite(tensor, packed.view(-1).view(torch.uint8).numpy())
        return tensor

    def bytes_on_device(self, tensor: torch.Tensor) -> Bytes | None:
        """A device tensor's present bytes, in the order of its elements; None for a host one's."""
        return self._memory.raw(tensor).read().copy() if self._memory.owns(tensor) else None

    def is_lost(self) -> bool:
        """A lost device steps no stream any more, so no copy of it will ever run."""
        return self._lost is not None

    # -- for tests and pacings --------------------------------------------------------------

    @property
    def live_device_bytes(self) -> int:
        """Bytes of device memory on which some tensor lives."""
        return self._memory.live_bytes

    @property
    def open_host_bytes(self) -> int:
        """Bytes of host buffers that were not closed."""
        return self._host.open_bytes

    def steppable(self) -> list[SimulatedStream]:
        """Streams whose next piece of work can run; none once the device is lost."""
        if self._lost is not None:
            return []
        return [stream for stream in self.streams if stream.queue and stream.head_can_run()]

    def step(self, stream: SimulatedStream) -> None:
        """Run one piece of work; it may be the one with which the device is lost."""
        error = self.faults.meet(FaultKind.DEVICE_LOST)
        if error is not None:
            self._lost = error
            return
        stream.step()

    def advance(self) -> bool:
        """Run one piece of work, drawn from `seed`; False if none can run."""
        streams = self.steppable()
        if streams:
            self.step(self._rng.choice(streams))
        return bool(streams)

    def violation(self, text: str) -> None:
        """Note that somebody broke the contract."""
        self.violations.append(text)

    def check_alive(self) -> None:
        """Raise if the device is lost."""
        if self._lost is not None:
            raise again(self._lost)

    def fence_call(self, member: str) -> None:
        """A member of a fence is used."""
        self._enter(member)
        if member == "record":
            self.check_alive()
            self.faults.raise_if_due(FaultKind.EVENT_RECORD)
        elif member != "wait_on":
            self._lost = self._lost or self.faults.meet(FaultKind.EVENT_WAIT)

    def fence_wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Hold the calling thread, as the pacing does it."""
        return self._pacing.wait(reached, timeout_s)

    # -- inside -----------------------------------------------------------------------------

    def _enter(self, member: str) -> None:
        """A call that works on the device, by a thread that must have bound itself to it."""
        self._pacing.call(member)
        if threading.get_ident() not in self._bound:
            self.violation(f"{member} is called by a thread that has not bound itself")
        if member in ("alloc_host", "snapshot", "copy_to_host", "copy_to_device"):
            self.check_alive()

    def _new_stream(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(name)
        self.streams.append(stream)
        return stream

    def _cloned(self, tensor: torch.Tensor, stream: SimulatedStream) -> torch.Tensor:
        source = self._memory.raw(tensor)
        clone = self._memory.empty(tensor.shape, tensor.dtype, stream)
        target = self._memory.raw(clone)
        stream.append(lambda: target.write(source.read()))
        return clone

    def _queue_copy(
        self, source: torch.Tensor, destination: torch.Tensor, stream: SimulatedStream
    ) -> None:
        buffer = self._host.buffer_of(destination)
        if buffer is None or not destination.is_contiguous():
            self.violation("a copy goes to memory that is not a contiguous host buffer")
            return
        if source.shape != destination.shape or source.dtype != destination.dtype:
            self.violation(f"a copy of {source.dtype} {tuple(source.shape)} changes its layout")
            return
        raw, target = self._memory.raw(source), buffer.bytes_of(destination)
        target.fill(HOST_POISON)
        rows = len(source) if source.dim() else 1
        step = len(target) // max(rows, 1) * self.profile.rows_per_copy or len(target)
        for first in range(0, len(target), step):
            piece = slice(first, first + step)
            stream.append(functools.partial(self._copy, raw, buffer, target, piece))

    def _copy(self, raw: RawRows, buffer: SimulatedHostBuffer, target: Bytes, piece: slice) -> None:
        if not buffer.is_open:
            self.violation("a copy ran into a host buffer that was closed meanwhile")
            return
        if raw.reused:
            self.violation("a copy read device memory that was freed meanwhile")
        self.faults.raise_if_due(FaultKind.COPY_RUN)
        target[piece] = raw.read()[piece]

    def _copy_back(self, rows: HostSource, target: RawRows) -> None:
        values = rows.read()
        if values is None:
            self.violation("a copy to the device read host memory that was freed meanwhile")
            return
        self.faults.raise_if_due(FaultKind.COPY_RUN)
        target.write(values)

    def _finish(self, stream: SimulatedStream) -> None:
        """Run everything before the end of `stream`, in the order of the device's choice."""
        while stream.queue and self.advance():
            pass
