"""Probes in processes of their own: what they import, what they leave, what breaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.source_tree import import_folder

PROBE_ALL = """
import json, os, sys
import torch
from slotmirror.core.registry import report_backends
before = dict(os.environ)
reports = report_backends()
print(json.dumps({
    "reasons": {r.installed.name: [r.probe.available, r.probe.reason] for r in reports},
    "vendors": sorted({"torch_npu", "torch_xla", "intel_extension_for_pytorch"} & set(sys.modules)),
    "environment": dict(os.environ) == before,
    "cuda": torch.cuda.is_initialized(),
}))
"""

WITHOUT_TORCH = """
import json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

hidden = Hidden()
sys.meta_path.insert(0, hidden)
failures = []
for name in ("cuda", "npu", "torch_device"):
    try:
        __import__(f"slotmirror.backends.{name}")
    except ModuleNotFoundError as error:
        failures.append(error.name)
vendors = sorted({"torch_npu", "torch"} & set(sys.modules))
sys.meta_path.remove(hidden)
for name in [n for n in sys.modules if n.partition(".")[0] == "slotmirror"]:
    del sys.modules[name]
from slotmirror.backends.cuda import CudaBackend
print(json.dumps([failures, vendors, CudaBackend.probe().reason]))
"""


def run(source: str, **environment: str) -> Any:
    """What a fresh process prints; a crash fails the test with its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(import_folder().parent), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_listing_probes_everything_and_changes_nothing(autoload: str) -> None:
    """A CPU build of torch: every backend answers with a reason, no vendor runtime is imported."""
    answer = run(PROBE_ALL, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert set(answer["reasons"]) >= {"cpu_ref", "cuda", "npu", "torch"}
    assert all(reason for _, reason in answer["reasons"].values())
    assert answer["reasons"]["cpu_ref"][0] is True
    assert answer["vendors"] == []
    assert answer["environment"] is True
    assert answer["cuda"] is False


def test_a_missing_torch_is_a_plain_import_error() -> None:
    """The module says that torch is missing, loads nothing else, and works once torch is there."""
    failures, vendors, reason = run(WITHOUT_TORCH)
    assert failures == ["torch"] * 3
    assert vendors == []
    assert reason
