"""What a backend says of itself, before and after it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from slotmirror.conformance.backend_suite.check import (
    CheckFailed,
    Refused,
    checks_of,
    refuses,
    require,
)
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.core.backend import API_VERSION, Probe
from slotmirror.core.errors import NotSupported

_PROBE_LIMIT_S = 120

_PROBE_SCRIPT = """
import importlib, json, os, sys, threading
import torch, numpy, slotmirror.core.backend
module, name = sys.argv[1:]
owner = importlib.import_module(module)
cls = owner
for part in name.split("."):
    cls = getattr(cls, part)
before = (dict(os.environ), set(sys.modules), threading.active_count())
first, second = cls.probe(), cls.probe()
contexts = [
    kind for kind in ("cuda", "xpu", "npu", "mtia", "hpu")
    if getattr(getattr(torch, kind, None), "is_initialized", bool)()
]
print(json.dumps({
    "same": first == second,
    "available": bool(first.available),
    "reason": first.reason,
    "devices": list(first.devices),
    "versions": dict(first.versions),
    "environment": sorted(k for k in {*before[0], *os.environ}
                          if before[0].get(k) != os.environ.get(k)),
    "modules": sorted({m.partition(".")[0] for m in set(sys.modules) - before[1]}
                      - {m.partition(".")[0] for m in before[1]}),
    "threads": threading.active_count() - before[2],
    "contexts": contexts,
}))
"""

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES",
           "ZE_AFFINITY_MASK")  # fmt: skip


def it_speaks_this_interface_version(bench: Workbench) -> None:
    """`api_version` is the core's, `name` and `device_type` are texts."""
    backend = type(bench.backend)
    require(backend.api_version == API_VERSION, f"api_version is {backend.api_version}")
    for member in ("name", "device_type"):
        found = getattr(backend, member, None)
        require(isinstance(found, str), f"{member} is {found!r}")
    require(backend.name.isidentifier(), f"name is {backend.name!r}: it stands in settings")
    device: object = bench.backend.device
    require(isinstance(device, torch.device), f"device is {device!r}")


def capabilities_are_constant_and_possible(bench: Workbench) -> None:
    """Two reads agree; alignment is a power of two, limits are not negative."""
    first, second = bench.backend.capabilities, bench.backend.capabilities
    require(first == second, f"capabilities change: {first}, then {second}")
    alignment = first.host_alignment_bytes
    require(alignment >= 1 and not alignment & (alignment - 1), f"alignment of {alignment} bytes")
    limit = first.max_pinned_bytes
    require(limit is None or limit >= 0, f"max_pinned_bytes is {limit}")


def the_probe_answers_in_full(bench: Workbench) -> None:
    """A `Probe` with a reason; available ones name their devices and torch's version."""
    probe = type(bench.backend).probe()
    require(isinstance(probe, Probe), f"probe() returned {probe!r}")
    require(probe.reason.strip(), "the probe gives no reason")
    require(probe.available, f"the backend under test says it cannot serve: {probe.reason}")
    require(probe.devices, "an available backend names no device")


def the_probe_has_no_side_effects(bench: Workbench) -> None:
    """In a process of its own: no context, no import of a vendor's runtime, environment kept."""
    answer = _probe_elsewhere(bench, {})
    require(answer["same"], "two probes of one process disagree")
    for what in ("environment", "modules", "contexts"):
        require(not answer[what], f"probing changed {what}: {answer[what]}")
    require(answer["threads"] == 0, f"probing left {answer['threads']} thread(s) behind")


def the_probe_survives_hidden_devices(bench: Workbench) -> None:
    """With all devices hidden it still answers, with a reason."""
    answer = _probe_elsewhere(bench, dict.fromkeys(_HIDING, ""))
    require(str(answer["reason"]).strip(), "the probe gives no reason when devices are hidden")


def undeclared_device_copies_raise_not_supported(bench: Workbench) -> None:
    """`copy_to_device` raises `NotSupported` where `device_copies` is not declared."""
    backend = bench.backend
    if backend.capabilities.device_copies:
        return  # declared: the copies' own checks test it
    with refuses(NotSupported, "device_copies is not declared, copy_to_device was called"):
        backend.copy_to_device(torch.zeros(4), backend.new_stream())


def memory_figures_are_possible(bench: Workbench) -> None:
    """0 ≤ free ≤ total; nothing is page-locked before something was allocated."""
    info = bench.backend.memory_info()
    require(info.device_free_bytes >= 0, f"{info.device_free_bytes} free bytes")
    require(info.device_free_bytes <= info.device_total_bytes, f"more free than there is: {info}")
    require(info.pinned_bytes == 0, f"{info.pinned_bytes} bytes page-locked at the start")


def _probe_elsewhere(bench: Workbench, environment: dict[str, str]) -> dict[str, object]:
    backend = type(bench.backend)
    if "<locals>" in backend.__qualname__:
        raise Refused(f"{backend.__qualname__} cannot be imported by another process")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE_SCRIPT, backend.__module__, backend.__qualname__],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=_PROBE_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise CheckFailed(f"a process that probes ended with {done.returncode}: {done.stderr}")
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


IDENTITY_CHECKS = checks_of(
    it_speaks_this_interface_version,
    capabilities_are_constant_and_possible,
    the_probe_answers_in_full,
    the_probe_has_no_side_effects,
    the_probe_survives_hidden_devices,
    undeclared_device_copies_raise_not_supported,
    memory_figures_are_possible,
)
