"""The probe of backend `torch`: what torch's device-generic API says."""

from __future__ import annotations

import types

import pytest
import torch

from slotmirror.backends.torch_device import TorchDeviceBackend, generic_probe
from slotmirror.core.registry import backend_class


class Gadget(TorchDeviceBackend):
    """A third party's device, served by the base alone."""

    name = "gadget"
    device_type = "gadget"


def accelerator(kind: str | None, count: int, *missing: str) -> types.SimpleNamespace:
    """A `torch.accelerator` of one kind."""
    found = None if kind is None else types.SimpleNamespace(type=kind)
    members = dict.fromkeys(generic_probe._NEEDED, lambda *_: None)
    members.update(current_accelerator=lambda: found, device_count=lambda: count)
    return types.SimpleNamespace(**{n: m for n, m in members.items() if n not in missing})


@pytest.mark.parametrize(
    ("backend", "found", "reason", "devices"),
    [
        (TorchDeviceBackend, accelerator("xpu", 2), "2 xpu device(s)", ("xpu:0", "xpu:1")),
        (TorchDeviceBackend, accelerator("xpu", 0), "0 xpu device(s)", ()),
        (TorchDeviceBackend, accelerator(None, 0), "built without an accelerator", ()),
        (Gadget, accelerator("gadget", 1), "1 gadget device(s)", ("gadget:0",)),
        (Gadget, accelerator("xpu", 1), "accelerator is xpu, not gadget", ()),
        (Gadget, accelerator("gadget", 1, "set_stream"), "lacks torch.accelerator.set_stream", ()),
    ],
)
def test_the_accelerator_of_this_torch_is_named(
    monkeypatch: pytest.MonkeyPatch,
    backend: type[TorchDeviceBackend],
    found: types.SimpleNamespace,
    reason: str,
    devices: tuple[str, ...],
) -> None:
    """`torch` serves any, a subclass its own type; an old torch says what it lacks."""
    monkeypatch.setattr(torch, "accelerator", found)
    probe = backend.probe()
    assert reason in probe.reason
    assert probe.devices == devices
    assert probe.available == bool(devices)


def test_whatever_torch_raises_becomes_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.accelerator` may raise where there is none."""
    odd = accelerator("xpu", 1)
    odd.device_count = lambda: 1 // 0
    monkeypatch.setattr(torch, "accelerator", odd)
    probe = TorchDeviceBackend.probe()
    assert not probe.available
    assert "torch cannot tell: ZeroDivisionError" in probe.reason


def test_the_base_is_offered_by_name_only() -> None:
    """Backend `torch` is never chosen automatically: a device's own backend knows more."""
    assert backend_class("torch") is TorchDeviceBackend
    assert TorchDeviceBackend.automatic is False
    assert backend_class("cuda").automatic is True
    assert backend_class("npu").automatic is True
