"""Which device backend serves an engine that computes on a torch device."""

from __future__ import annotations

import os

import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.registry import ENVIRONMENT_VARIABLE, load_backend

_BY_DEVICE_TYPE = {"cpu": "cpu_ref", "cuda": "cuda", "npu": "npu"}
_ANY_OTHER = "torch"


def backend_for(device: torch.device, name: str | None = None) -> DeviceBackend:
    """The backend `name`, else the one that the environment names, else by the device's type.

    Not the automatic choice of `load_backend`: an engine may compute on the CPU of a machine that
    has an accelerator.
    """
    if name is None and not os.environ.get(ENVIRONMENT_VARIABLE):
        name = _BY_DEVICE_TYPE.get(device.type, _ANY_OTHER)
    return load_backend(name, device)
