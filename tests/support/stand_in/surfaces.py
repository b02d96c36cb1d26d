"""Modules with torch's names: each name, parameter and default here is checked to be torch's."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from support.stand_in.device import DEVICES, StandInDevice, StandInEvent, StandInStream


def _index(device: object) -> int | None:
    if isinstance(device, torch.device):
        return device.index
    return device if isinstance(device, int) else None


class CudaRuntime:
    """`torch.cuda.cudart()`."""

    def __init__(self, owner: StandInDevice) -> None:
        self._owner = owner
        self.refuse_after = 1 << 30

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        if len(self._owner.pinned.registered) >= self.refuse_after:
            return 2
        self._owner.allow_pinning(size)
        self._owner.pinned.registered[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:
        return 0 if self._owner.pinned.registered.pop(ptr, None) else 713


class DeviceModule:
    """What `torch.cuda` and `torch.npu` have in common, and the backends use."""

    def __init__(self, owner: StandInDevice) -> None:
        family = type(self).__name__
        self._owner = owner
        self._family = family

        class Stream(StandInStream):
            def __new__(cls, device=None):
                index = _index(device)
                return owner.pooled_stream(family, owner.current_index if index is None else index)

            def __init__(self, device=None):
                pass

        class Event(StandInEvent):
            def __init__(self):
                super().__init__(owner, family)

        self.Stream = Stream
        self.Event = Event

    def current_device(self):
        return self._owner.current_index

    def device_count(self):
        return DEVICES

    def set_device(self, device):
        self._owner.current_index = _index(device)

    def current_stream(self, device=None):
        return self._owner.current(self._family, _index(device))

    def stream(self, stream):
        return self._owner.using(stream)

    def is_current_stream_capturing(self):
        return self._owner.current(self._family).is_capturing()

    def mem_get_info(self, device=None):
        return (1 << 30) - self._owner.memory.live_bytes, 1 << 30


class CudaModule(DeviceModule):
    """`torch.cuda`."""

    def __init__(self, owner: StandInDevice) -> None:
        super().__init__(owner)
        self.runtime = CudaRuntime(owner)

    def cudart(self):
        return self.runtime


class NpuModule(DeviceModule):
    """`torch.npu`."""


class Accelerator:
    """`torch.accelerator`."""

    def __init__(self, owner: StandInDevice) -> None:
        self._owner = owner

    def current_device_index(self):
        return self._owner.current_index

    def set_device_index(self, device, /):
        self._owner.current_index = _index(device)

    def current_stream(self, device=None, /):
        return self._owner.current("generic", _index(device))

    def set_stream(self, stream):
        self._owner.set_current(stream)

    def get_memory_info(self, device_index=None, /):
        return (1 << 30) - self._owner.memory.live_bytes, 1 << 30


class TorchModule:
    """`torch` itself, its device-generic part."""

    def __init__(self, owner: StandInDevice) -> None:
        self.accelerator = Accelerator(owner)

        class Stream(StandInStream):
            def __new__(cls, device):
                return owner.pooled_stream("generic", _index(device) or 0)

            def __init__(self, device):
                pass

        class Event(StandInEvent):
            def __init__(self, device=None):
                super().__init__(owner, "generic")

        self.Stream = Stream
        self.Event = Event


@contextmanager
def captured(owner: StandInDevice, family: str):
    """The calling thread captures its current stream into a graph, in the global mode."""
    owner.capturing = owner.current(family).queue
    try:
        yield
    finally:
        owner.capturing = None
