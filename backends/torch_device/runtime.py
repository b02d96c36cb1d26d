"""What a torch device's backend is made of, besides the class."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

from slotmirror.backends.torch_device.capture_mode import RelaxedCapture
from slotmirror.backends.torch_device.device_api import DeviceApi
from slotmirror.backends.torch_device.fences import PolledWait
from slotmirror.backends.torch_device.registered_memory import HostRegistration


@dataclass(frozen=True, slots=True)
class DeviceRuntime:
    """The parts in which torch devices differ.

    api           the one family of streams and events that is used
    relaxed       around calls that must not disturb a capture in another thread
    registration  page-locks existing memory; None: only torch's own allocator page-locks
    wait          how threads wait for fences
    """

    api: DeviceApi
    relaxed: RelaxedCapture = nullcontext
    registration: HostRegistration | None = None
    wait: PolledWait = field(default_factory=PolledWait)
