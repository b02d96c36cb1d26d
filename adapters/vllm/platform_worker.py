"""Which worker class the mixin goes over: the platform's own."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

from slotmirror.adapters.vllm.worker_mixin import StageMirrorMixin
from slotmirror.core.errors import ConfigError

ENVIRONMENT_VARIABLE = "SLOTMIRROR_VLLM_WORKER"
"""Names the worker class, as "package.module.Class", on platforms that are not in the table."""

PLATFORM_WORKERS = {
    "cpu": ("vllm.v1.worker.cpu_worker.CPUWorker",),
    "cuda": ("vllm.v1.worker.gpu_worker.Worker",),
    "xpu": ("vllm.v1.worker.xpu_worker.XPUWorker",),
    "npu": (
        "vllm_ascend.worker.worker.NPUWorker",
        # Releases before 0.12 keep it under its former module name.
        "vllm_ascend.worker.worker_v1.NPUWorker",
    ),
}
"""By the platform's device type; ROCm reports itself as cuda."""


@cache
def worker_class() -> type[Any]:
    """The platform's worker with slotmirror's mixin; the same class at every call.

    Raises `ConfigError` where the platform, or the class that the environment names, is unknown.
    """
    base = _load(os.environ.get(ENVIRONMENT_VARIABLE)) or _platform_class()
    if issubclass(base, StageMirrorMixin):
        return base
    return type("Worker", (StageMirrorMixin, base), {"__module__": "slotmirror.adapters.vllm"})


def _platform_class() -> type[Any]:
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    errors = []
    for name in PLATFORM_WORKERS.get(device_type, ()):
        try:
            return _import(name)
        except ImportError as error:
            errors.append(f"{name}: {error}")
    raise ConfigError(
        "worker_cls",
        "slotmirror.adapters.vllm.Worker",
        f"no worker class for device type {device_type!r} ({'; '.join(errors) or 'not known'}): "
        f"name it in {ENVIRONMENT_VARIABLE}",
    )


def _load(name: str | None) -> type[Any] | None:
    if not name:
        return None
    try:
        return _import(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(ENVIRONMENT_VARIABLE, name, f"cannot be imported: {error}") from error


def _import(name: str) -> type[Any]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(f"{module} has no {attribute}") from error
    if not isinstance(found, type):
        raise ImportError(f"{name} is not a class")
    return found
