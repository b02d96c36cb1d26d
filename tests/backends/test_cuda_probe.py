"""The cuda probe: facts in, a reason out, nothing opened and nothing raised."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from slotmirror.backends.cuda import CudaBackend
from slotmirror.backends.cuda.probe import probe_cuda
from slotmirror.core.backend import Probe


def cuda_like(device_count: Callable[[], int], module: str = "torch.cuda") -> types.SimpleNamespace:
    """A module with the members that the backend uses, all of them defined in `module`."""

    def member() -> None:
        raise AssertionError("the probe must not call it")

    member.__module__ = module
    counting = types.FunctionType(device_count.__code__, device_count.__globals__)
    counting.__module__ = module
    names = ("Event", "Stream", "current_stream", "set_device", "stream")
    return types.SimpleNamespace(**dict.fromkeys(names, member), device_count=counting)


def two() -> int:
    return 2


def none() -> int:
    return 0


def broken() -> int:
    raise AssertionError("Torch not compiled with CUDA enabled")


def built_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None = None) -> None:
    """Let torch say what it was built for."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)


def unavailable(probe: Probe) -> str:
    """The reason of a probe that found nothing."""
    assert probe.available is False
    assert probe.devices == ()
    return probe.reason


def test_a_cpu_build_of_torch_says_so() -> None:
    """The torch of this environment: no call that would raise AssertionError is made."""
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    assert "is a CPU build: install one built for CUDA" in unavailable(CudaBackend.probe())


def test_devices_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's names; versions tell what it was built for."""
    built_for(monkeypatch, "13.0")
    probe = probe_cuda(cuda_like(two))
    assert probe.available
    assert probe.devices == ("cuda:0", "cuda:1")
    assert probe.versions == {"torch": str(torch.__version__), "cuda": "13.0"}


def test_no_visible_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build on a machine without GPU, or with all of them hidden."""
    built_for(monkeypatch, "13.0")
    assert "CUDA_VISIBLE_DEVICES" in unavailable(probe_cuda(cuda_like(none)))


def test_rocm_reports_as_cuda_and_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls AMD's devices cuda."""
    built_for(monkeypatch, None, hip="7.0")
    probe = probe_cuda(cuda_like(two))
    assert probe.available
    assert "ROCm build of torch, which calls them cuda" in probe.reason
    assert probe.versions["hip"] == "7.0"


def test_a_stand_in_for_torch_cuda_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu's transfer tool puts its own functions in torch.cuda's place."""
    built_for(monkeypatch, "13.0")
    reason = unavailable(probe_cuda(cuda_like(two, module="torch_npu.npu.utils")))
    assert reason.startswith("torch.cuda is a stand-in for another device here")
    assert "Event of torch_npu.npu.utils" in reason


@pytest.mark.parametrize("module", [cuda_like(broken), types.SimpleNamespace()])
def test_whatever_torch_raises_becomes_the_reason(
    monkeypatch: pytest.MonkeyPatch, module: types.SimpleNamespace
) -> None:
    """Assertion errors of CPU builds, missing members of odd ones."""
    built_for(monkeypatch, "13.0")
    assert "torch.cuda cannot tell: A" in unavailable(probe_cuda(module))
