"""The handful of torch calls through which a device is driven, behind one small interface.

torch offers them twice: device-generic (`torch.Stream`, `torch.Event`, `torch.accelerator`) and per
device module (`torch.cuda`, `torch.npu`). One backend uses one of the two families for everything:
a native NPU event cannot be waited on by a generic stream (2.10), and a native XPU event in a
generic wait drops the dependency without a word (backends spec, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class DeviceStream(Protocol):
    """A queue of device work."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for what is now in `stream`; the calling thread goes on."""
        ...


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None:
        """Place it behind the work that is now in `stream`."""
        ...

    def wait(self, stream: Any) -> None:
        """Let later work of `stream` wait for it; the calling thread goes on."""
        ...

    def query(self) -> bool:
        """Whether it was reached."""
        ...


class DeviceApi(Protocol):
    """What the shared base needs of a torch device; any thread."""

    def current_device(self) -> int:
        """Index of the device that is current in the calling thread."""
        ...

    def set_device(self, device: torch.device) -> None:
        """Make it current in the calling thread; a new thread sits on device 0 until then."""
        ...

    def current_stream(self, device: torch.device) -> DeviceStream:
        """The stream on which the calling thread issues its work."""
        ...

    def new_stream(self, device: torch.device) -> DeviceStream:
        """One of the streams that torch keeps, 32 of a kind, and gives out round robin."""
        ...

    def use_stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Work that the calling thread issues inside goes to `stream`."""
        ...

    def new_event(self, device: torch.device) -> DeviceEvent:
        """An event; nothing is created on the device before it is recorded."""
        ...

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        """Free and total device bytes; zeros where torch cannot tell."""
        ...


class GenericApi:
    """The device-generic family; `source` is torch, or what a test puts in its place."""

    def __init__(self, source: Any = torch) -> None:
        self._torch = source

    def current_device(self) -> int:
        return int(self._torch.accelerator.current_device_index())

    def set_device(self, device: torch.device) -> None:
        self._torch.accelerator.set_device_index(device)

    def current_stream(self, device: torch.device) -> DeviceStream:
        stream: DeviceStream = self._torch.accelerator.current_stream(device)
        return stream

    def new_stream(self, device: torch.device) -> DeviceStream:
        stream: DeviceStream = self._torch.Stream(device)
        return stream

    @contextmanager
    def use_stream(self, stream: DeviceStream) -> Iterator[None]:
        accelerator = self._torch.accelerator
        former = accelerator.current_stream()
        accelerator.set_stream(stream)
        try:
            yield
        finally:
            accelerator.set_stream(former)

    def new_event(self, device: torch.device) -> DeviceEvent:
        event: DeviceEvent = self._torch.Event(device)
        return event

    def is_capturing(self, device: torch.device) -> bool:
        return bool(self._torch.accelerator.current_stream(device).is_capturing())

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        free, total = self._torch.accelerator.get_memory_info(device)
        return int(free), int(total)


class ModuleApi:
    """The family of one device module: `torch.cuda`, `torch.npu`, or a stand-in for either."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def current_device(self) -> int:
        return int(self._module.current_device())

    def set_device(self, device: torch.device) -> None:
        self._module.set_device(device)

    def current_stream(self, device: torch.device) -> DeviceStream:
        stream: DeviceStream = self._module.current_stream(device)
        return stream

    def new_stream(self, device: torch.device) -> DeviceStream:
        stream: DeviceStream = self._module.Stream(device)
        return stream

    def use_stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def new_event(self, device: torch.device) -> DeviceEvent:
        event: DeviceEvent = self._module.Event()
        return event

    def is_capturing(self, device: torch.device) -> bool:
        return bool(self._module.is_current_stream_capturing())

    def memory_info(self, device: torch.device) -> tuple[int, int]:
        free, total = self._module.mem_get_info(device)
        return int(free), int(total)
