"""torch_npu really installed, on a machine without CANN: everything is said, nothing breaks.

There `import torch` imports torch_npu by itself, fails on a shared library, and leaves a process
that cannot import torch any more, unless that was switched off before.
"""

from __future__ import annotations

import json
import zipfile

import pytest

from support.fresh_env import FreshEnv
from support.torch_npu_sources import NotReachable, wheel_for_this_torch

pytestmark = pytest.mark.packaging

PROBE = """
import json, os, sys
variable = "TORCH_DEVICE_BACKEND_AUTOLOAD"
os.environ[variable] = "0"
import torch
from slotmirror.core.errors import BackendUnavailable
from slotmirror.core.registry import load_backend, report_backends
from slotmirror.backends.npu import NpuBackend

reports = {r.installed.name: [r.probe.available, r.probe.reason] for r in report_backends()}
imported_by_probe = "torch_npu" in sys.modules
try:
    load_backend("npu")
except BackendUnavailable as error:
    by_name = error.reason
try:
    NpuBackend()  # as if the probe had been wrong
except BackendUnavailable as error:
    constructed = error.reason
after = torch.ones(3).sum().item()  # torch goes on working
chosen = load_backend().name
print(json.dumps([reports, imported_by_probe, by_name, constructed, os.environ[variable], after,
                  chosen]))
"""


@pytest.fixture(scope="module")
def env_with_torch_npu(wheel, tmp_path_factory, request):
    """A fresh environment with slotmirror, and torch_npu unpacked beside it as pip would."""
    try:
        torch_npu = wheel_for_this_torch(request.config.cache.mkdir("torch_npu"))
    except NotReachable as error:
        pytest.skip(f"torch_npu's wheel cannot be downloaded: {error}")
    env = FreshEnv(tmp_path_factory.mktemp("npu_env") / "env")
    env.install(wheel)
    with zipfile.ZipFile(torch_npu) as archive:
        archive.extractall(env.site_packages)
    return env


def test_probes_loads_and_choice_survive_a_broken_torch_npu(env_with_torch_npu, tmp_path):
    """Reasons are clear, the probe imports nothing, a guarded import fails cleanly."""
    output = env_with_torch_npu.run("python", "-c", PROBE, cwd=tmp_path)
    reports, imported, by_name, constructed, variable, after, chosen = json.loads(
        output.splitlines()[-1]
    )
    assert reports["cpu_ref"][0] is True
    assert reports["npu"] == [
        False,
        "CANN is missing: libascendcl.so is on no library path; source its set_env.sh",
    ]
    assert by_name == reports["npu"][1]
    assert imported is False
    assert constructed.startswith("torch_npu cannot be imported: ImportError: lib")
    assert variable == "0"
    assert after == 3.0
    assert chosen == "cpu_ref"


def test_the_command_lists_everything_there(env_with_torch_npu, tmp_path, monkeypatch):
    """`slotmirror backends` needs no setting from its user: a table with every reason."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("COLUMNS", "250")
    listed = env_with_torch_npu.run("slotmirror", "backends", cwd=tmp_path)
    assert "CANN is missing: libascendcl.so is on no library path" in listed
    for name in ("cpu_ref", "cuda", "npu", "torch"):
        assert f"│ {name} " in listed
