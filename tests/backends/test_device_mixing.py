"""No operation mixes host and device tensors: torch's fake tensors know where each would lie."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import DeviceContext

from slotmirror.backends.torch_device import TorchDeviceBackend
from slotmirror.backends.torch_device.device_api import GenericApi
from slotmirror.backends.torch_device.runtime import DeviceRuntime
from slotmirror.core.backend import Fence
from support.stand_in.device import StandInDevice
from support.stand_in.surfaces import TorchModule


class OnFakes(TorchDeviceBackend):
    """The base for a device type on which fake tensors can be made without its runtime."""

    name = device_type = "meta"

    def _open(self) -> DeviceRuntime:
        return DeviceRuntime(GenericApi(TorchModule(StandInDevice())))


class Mixing(OnFakes):
    """A backend with the fault: an index that was left on the host."""

    def snapshot(self, tensors):
        order = torch.arange(len(tensors[0]))
        return [tensor + order[:, None] for tensor in tensors]


def launch(backend: OnFakes, source: torch.Tensor) -> tuple[torch.Tensor, Fence]:
    """A whole capture of `source`, as the core does it."""
    page = torch.empty(source.shape, dtype=torch.float16)
    [clone] = backend.snapshot([source])
    assert backend.owns(clone)
    fence = backend.new_fence()
    stream = backend.new_stream()
    backend.copy_to_host([(clone, page)], stream, backend.current_stream(), fence)
    return page, fence


def test_captures_mix_no_devices() -> None:
    """Strides, another dtype: everything but the copy itself happens where the source lies."""
    with FakeTensorMode():
        backend = OnFakes(torch.device("meta", 0))
        source = torch.empty((6, 4), device="meta").t()
        assert backend.owns(source) == (source.device == backend.device)
        backend.device = source.device
        page, fence = launch(backend, source)
        assert page.device.type == "cpu"
        kept = fence._recording.kept
        assert [(t.device.type, t.dtype) for t in kept] == [("meta", torch.float16)]


def test_rows_for_the_device_are_made_there() -> None:
    """`copy_to_device` leaves its source on the host and its result on the device."""
    with FakeTensorMode():
        backend = OnFakes(torch.device("meta", 0))
        source = torch.empty(3, 4)
        tensor, _ = backend.copy_to_device(source, backend.new_stream())
        assert source.device.type == "cpu"
        assert tensor.device.type == "meta"


def test_a_planted_mixture_is_caught() -> None:
    """An index that was left on the host is refused."""
    with FakeTensorMode():
        backend = Mixing(torch.device("meta", 0))
        backend.device = torch.device("meta")
        with pytest.raises(RuntimeError, match="two devices, meta"):
            launch(backend, torch.empty((6, 4), device="meta"))


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_default_device_of_the_engine_moves_no_host_buffer(default: str) -> None:
    """Engines set a default device while they load; pages must still lie on the host."""
    backend = OnFakes(torch.device("meta", 0))
    with DeviceContext(torch.device(default)):
        for num_bytes in (100, 3 << 20):
            buffer = backend.alloc_host((num_bytes,), torch.uint8, pinned=False)
            assert buffer.tensor.device.type == "cpu"
            buffer.close()
            assert buffer.tensor.device.type == "cpu"
