"""Whether this machine has CUDA devices, without opening one."""

from __future__ import annotations

from typing import Any

import torch

from slotmirror.core.backend import Probe

_USED = ("Event", "Stream", "current_stream", "device_count", "set_device", "stream")


def probe_cuda(module: Any) -> Probe:
    """Probe for the devices of `module`, which is `torch.cuda`; never raises.

    Counts devices through the management library where torch can, which leaves a process free to
    fork; no context is opened, so names and memory of the devices stay unknown.
    """
    versions = {"torch": str(torch.__version__)}
    for name in ("cuda", "hip"):
        if getattr(torch.version, name, None):
            versions[name] = str(getattr(torch.version, name))
    try:
        reason, count = _look(module)
    except Exception as error:
        reason, count = f"torch.cuda cannot tell: {type(error).__name__}: {error}", 0
    return Probe(bool(count), reason, tuple(f"cuda:{index}" for index in range(count)), versions)


def _look(module: Any) -> tuple[str, int]:
    impostors = sorted(_impostors(module))
    if impostors:
        return f"torch.cuda is a stand-in for another device here: {', '.join(impostors)}", 0
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) is a CPU build: install one built for CUDA", 0
    count = int(module.device_count())
    if not count:
        return "no device is visible: no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it", 0
    if torch.version.hip is not None:
        return f"{count} device(s) of a ROCm build of torch, which calls them cuda", count
    return f"{count} CUDA device(s)", count


def _impostors(module: Any) -> set[str]:
    """Members of `module` that others have put there, as torch_npu's transfer tool does."""
    owners = {name: str(getattr(getattr(module, name), "__module__", "")) for name in _USED}
    return {
        f"{name} of {owner}"
        for name, owner in owners.items()
        if owner.split(".")[:2] != ["torch", "cuda"]
    }
