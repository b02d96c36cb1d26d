"""The backend of NVIDIA GPUs: what they have beyond the shared base.

A ROCm build of torch calls its devices cuda too and is served by the same code.
"""

from __future__ import annotations

import torch

from slotmirror.backends.cuda.probe import probe_cuda
from slotmirror.backends.cuda.registration import CudaRegistration
from slotmirror.backends.torch_device import TorchDeviceBackend
from slotmirror.backends.torch_device.capture_mode import RelaxedCapture, relaxed_capture
from slotmirror.backends.torch_device.device_api import ModuleApi
from slotmirror.backends.torch_device.runtime import DeviceRuntime
from slotmirror.core.backend import Probe


class CudaBackend(TorchDeviceBackend):
    """Streams and events of `torch.cuda`."""

    name = "cuda"
    device_type = "cuda"
    automatic = True

    @classmethod
    def probe(cls) -> Probe:
        return probe_cuda(torch.cuda)

    def _open(self) -> DeviceRuntime:
        return DeviceRuntime(
            api=ModuleApi(torch.cuda),
            relaxed=_relaxed(),
            registration=CudaRegistration(torch.cuda),
        )


def _relaxed() -> RelaxedCapture:
    if torch.version.hip is not None:
        return relaxed_capture("libamdhip64.so", "hipThreadExchangeStreamCaptureMode")
    return relaxed_capture("libcuda.so.1", "cuThreadExchangeStreamCaptureMode")
