"""Whether this machine has Ascend NPUs, without importing torch_npu.

Importing it is not a question that can be taken back: without CANN a process in which `import
torch` loads it by itself cannot import torch any more. So the probe reads what lies around: what
torch has loaded, the installed metadata, the runtime's library and the driver's device files.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import torch

from slotmirror.core.backend import Probe

RUNTIME_LIBRARY = "libascendcl.so"
DEVICE_FOLDER = Path("/dev")
LOADER_CACHE = Path("/etc/ld.so.cache")

_CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TORCH_PIN = re.compile(r"torch\s*\(?\s*==\s*(\d+(?:\.\d+)*)")


def probe_npu() -> Probe:
    """Probe for Ascend devices; never raises and imports nothing."""
    versions = {"torch": str(torch.__version__)}
    try:
        installed = _installed_version()
        if installed is not None:
            versions["torch_npu"] = installed
        obstacle = _loaded_elsewhere() or _not_importable(installed) or _nothing_to_drive()
        devices = () if obstacle else _devices()
    except Exception as error:
        obstacle, devices = f"cannot tell: {type(error).__name__}: {error}", ()
    if not obstacle and not devices:
        obstacle = "no device is visible: ASCEND_RT_VISIBLE_DEVICES hides it, or there is none"
    reason = obstacle or f"{len(devices)} Ascend device(s)"
    return Probe(not obstacle, reason, devices, versions)


def _loaded_elsewhere() -> str:
    """What this process has loaded that torch_npu does not tolerate beside itself."""
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("npu", "privateuseone"):
        return f"torch's one place for a device package is taken by {name!r}"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type not in ("npu", "privateuseone"):
        return (
            f"this torch ({torch.__version__}) is built for {accelerator.type}; torch_npu needs "
            "the CPU build"
        )
    return ""


def _not_importable(version: str | None) -> str:
    """Why torch_npu cannot be imported here, as far as metadata and files tell."""
    if torch._C._get_privateuse1_backend_name() == "npu":
        return ""  # it has been imported already
    if version is None or find_spec("torch_npu") is None:
        return "torch_npu is not installed: pip install 'slotmirror[npu]'"
    pin = _torch_pin()
    if pin is not None and not _satisfies(str(torch.__version__), pin):
        return f"torch_npu {version} is built for torch {pin}, this is {torch.__version__}"
    if not _has_runtime_library():
        return f"CANN is missing: {RUNTIME_LIBRARY} is on no library path; source its set_env.sh"
    return ""


def _nothing_to_drive() -> str:
    """Whether the driver is missing, or not passed into this container."""
    manager = DEVICE_FOLDER / "davinci_manager"
    return "" if manager.exists() else f"the driver is missing: no {manager}"


def _installed_version() -> str | None:
    try:
        return distribution("torch_npu").version
    except PackageNotFoundError:
        return None


def _torch_pin() -> str | None:
    """The torch release that the installed torch_npu requires; None if it does not say."""
    for requirement in distribution("torch_npu").requires or ():
        pinned = _TORCH_PIN.match(requirement)
        if pinned:
            return pinned[1]
    return None


def _satisfies(version: str, pin: str) -> bool:
    """Whether `version`, its local part aside, is a release of `pin`."""
    release = version.partition("+")[0].split(".")
    return release[: len(pin.split("."))] == pin.split(".")


def _has_runtime_library() -> bool:
    """Whether the loader would find it: by search paths, CANN's own variables, or its cache."""
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths += [f"{os.environ[name]}/lib64" for name in _CANN_HOMES if os.environ.get(name)]
    if any((Path(path) / RUNTIME_LIBRARY).is_file() for path in paths if path):
        return True
    return LOADER_CACHE.is_file() and RUNTIME_LIBRARY.encode() in LOADER_CACHE.read_bytes()


def _devices() -> tuple[str, ...]:
    """Names by torch's count: from 0, over the devices that this process may see."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        count = len([index for index in visible.split(",") if index.strip()])
    else:
        nodes = DEVICE_FOLDER.iterdir()
        count = sum(re.fullmatch(r"davinci\d+", node.name) is not None for node in nodes)
    return tuple(f"npu:{index}" for index in range(count))
