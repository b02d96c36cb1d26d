"""The shipped backends over the stand-in, and the mode that belongs to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slotmirror.backends.cuda import CudaBackend
from slotmirror.backends.cuda.registration import CudaRegistration
from slotmirror.backends.npu import NpuBackend
from slotmirror.backends.torch_device import TorchDeviceBackend
from slotmirror.backends.torch_device.device_api import GenericApi, ModuleApi
from slotmirror.backends.torch_device.fences import PolledWait
from slotmirror.backends.torch_device.runtime import DeviceRuntime
from slotmirror.core.backend import Probe
from support.stand_in.device import StandInDevice
from support.stand_in.dispatch import StandInMode
from support.stand_in.surfaces import CudaModule, NpuModule, TorchModule


class OnStandIn(TorchDeviceBackend):
    """What changes without hardware: the module that is driven, and where tensors are found.

    Serves the stand-in's device 1, so that a thread that has not bound itself is on another.
    """

    device_type = "cpu"
    automatic = False

    def __init__(self, device: torch.device | None = None, stand_in: StandInDevice | None = None):
        self.stand_in = stand_in or StandInDevice()
        self.mode = StandInMode(self.stand_in)
        self.stand_in.current_index = 1
        super().__init__(device)
        self.device = torch.device("cpu", 1)

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "stands in for a device", ("cpu:1",), {"torch": str(torch.__version__)})

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.stand_in.memory.owns(tensor)

    def bind_thread(self, device: torch.device) -> None:
        """A thread of the core's own gets the mode with its device, and ends with it."""
        super().bind_thread(device)
        if threading.current_thread() is not threading.main_thread():
            self.stand_in.enter_once(StandInMode)

    def _waits(self) -> PolledWait:
        return PolledWait(self.stand_in.monotonic, self.stand_in.sleep)


class StandInCuda(OnStandIn, CudaBackend):
    """The cuda backend over a stand-in of `torch.cuda`."""

    def _open(self) -> DeviceRuntime:
        self.module = CudaModule(self.stand_in)
        return DeviceRuntime(
            ModuleApi(self.module),
            relaxed=self.stand_in.relaxed,
            registration=CudaRegistration(self.module),
            wait=self._waits(),
        )


class StandInNpu(OnStandIn, NpuBackend):
    """The npu backend over a stand-in of `torch.npu`."""

    def _open(self) -> DeviceRuntime:
        self.module = NpuModule(self.stand_in)
        return DeviceRuntime(
            ModuleApi(self.module), relaxed=self.stand_in.relaxed, wait=self._waits()
        )


class StandInTorch(OnStandIn):
    """The base over a stand-in of torch's device-generic names."""

    def _open(self) -> DeviceRuntime:
        self.module = TorchModule(self.stand_in)
        return DeviceRuntime(
            GenericApi(self.module), relaxed=self.stand_in.relaxed, wait=self._waits()
        )


@contextmanager
def active(backend: OnStandIn) -> Iterator[OnStandIn]:
    """Operations of the calling thread on the backend's tensors go to the device."""
    with backend.mode:
        yield backend
