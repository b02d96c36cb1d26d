"""The comparison with the real vLLM, where there is none."""

import importlib.util
import subprocess
import sys

import pytest

from support.source_tree import ROOT


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_script_says_how_to_get_it():
    """Exit code 2 and the make target that sets the environment up; nothing is installed."""
    script = ROOT / "benchmarks" / "against_vllm.py"
    done = subprocess.run(
        [sys.executable, script, "--quick"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "make against-vllm" in done.stdout
    assert done.stderr == ""
