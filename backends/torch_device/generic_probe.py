"""What torch says of its accelerator, asked through the device-generic API alone."""

from __future__ import annotations

import torch

from slotmirror.core.backend import Probe

_NEEDED = (
    "current_accelerator",
    "current_device_index",
    "current_stream",
    "device_count",
    "get_memory_info",
    "set_device_index",
    "set_stream",
)


def accelerator_type() -> str | None:
    """The type of this torch's accelerator, whether a device is there or not; None without."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def probe_accelerator(device_type: str) -> Probe:
    """Probe for torch's accelerator; `device_type` is the one that is wanted, empty for any.

    Never raises: a torch without accelerator answers some of these calls with errors.
    """
    versions = {"torch": str(torch.__version__)}
    try:
        reason, devices = _look(device_type)
    except Exception as error:
        reason, devices = f"torch cannot tell: {type(error).__name__}: {error}", ()
    return Probe(bool(devices), reason, devices, versions)


def _look(device_type: str) -> tuple[str, tuple[str, ...]]:
    missing = [name for name in _NEEDED if not hasattr(torch.accelerator, name)]
    if missing:
        return f"this torch lacks torch.accelerator.{', '.join(missing)}: use a newer one", ()
    found = accelerator_type()
    if found is None:
        return f"this torch ({torch.__version__}) was built without an accelerator", ()
    if device_type not in ("", found):
        return f"this torch's accelerator is {found}, not {device_type}", ()
    count = torch.accelerator.device_count()
    devices = tuple(f"{found}:{index}" for index in range(count))
    return f"{count} {found} device(s), through torch's device-generic API", devices
