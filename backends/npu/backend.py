"""The backend of Ascend NPUs: what they have beyond the shared base.

torch_npu is imported when this backend was chosen and not before (see `probe`).
"""

from __future__ import annotations

from slotmirror.backends.npu.probe import probe_npu
from slotmirror.backends.npu.torch_npu_import import import_torch_npu
from slotmirror.backends.torch_device import TorchDeviceBackend
from slotmirror.backends.torch_device.capture_mode import relaxed_capture
from slotmirror.backends.torch_device.device_api import ModuleApi
from slotmirror.backends.torch_device.runtime import DeviceRuntime
from slotmirror.core.backend import Probe


class NpuBackend(TorchDeviceBackend):
    """Streams and events of `torch.npu`.

    Events and waits pass through torch_npu's task queue in the order of their calls: a fence is
    not reached before its record was taken from that queue. Page-locked memory comes from torch's
    allocator alone; one allocation of more than about 200 GB fails, and older driver kits
    page-lock 20-64 GB in all.
    """

    name = "npu"
    device_type = "npu"
    automatic = True

    @classmethod
    def probe(cls) -> Probe:
        return probe_npu()

    def _open(self) -> DeviceRuntime:
        return DeviceRuntime(
            api=ModuleApi(import_torch_npu().npu),
            relaxed=relaxed_capture("libascendcl.so", "aclmdlRICaptureThreadExchangeMode"),
        )
