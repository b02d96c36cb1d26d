"""The drop-in for vLLM-Omni's cache: beside the wheel's own, under its runner mixin, and held
against the sources of the runners, GPU and NPU, which need too much to be imported."""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest

from slotmirror.adapters.vllm_omni.group_view import stage_prefix_cache_config
from slotmirror.adapters.vllm_omni.manager import OmniPrefixCacheManager
from slotmirror.adapters.vllm_omni.replacements import REPLACEMENTS

PACKAGE = "vllm_omni.core.prefix_cache"
GPU, NPU = "worker", "platforms/npu/worker"
BASE_RUNNERS = [f"{GPU}/gpu_model_runner.py", f"{NPU}/npu_model_runner.py"]
AR_RUNNERS = [f"{GPU}/gpu_ar_model_runner.py", f"{NPU}/npu_ar_model_runner.py"]
HOOKS = {"_prefix_cache_step_begin", "_prefix_cache_save_step", "_prefix_cache_materialize"}


def tree_of(module: str) -> ast.Module:
    """A module of the wheel, parsed."""
    path = Path(os.environ["SLOTMIRROR_OMNI_WHEEL"]) / "vllm_omni" / module
    return ast.parse(path.read_text(encoding="utf-8"))


def attributes_of(tree: ast.Module, owner: str) -> set[str]:
    """Names that are read from `self.OWNER` or, with an empty owner, from `self`."""
    text = f"self.{owner}" if owner else "self"
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == text
    }


@pytest.mark.parametrize("module", BASE_RUNNERS + AR_RUNNERS)
def test_what_the_runners_use_is_replaced(module):
    """Each name that they import from the cache, and each member of it that they call."""
    tree = tree_of(module)
    imported = {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE
        for name in node.names
    }
    assert imported <= set(REPLACEMENTS)
    assert attributes_of(tree, "omni_prefix_cache") <= set(dir(OmniPrefixCacheManager))


@pytest.mark.parametrize("module", AR_RUNNERS)
def test_both_platforms_go_through_the_mixin(module):
    """GPU and NPU runners call the same three hooks, which the drop-in stands behind."""
    assert attributes_of(tree_of(module), "") >= HOOKS


@pytest.mark.parametrize("module", BASE_RUNNERS)
def test_the_gate_is_called_as_it_can_be(module):
    """Every keyword is a parameter of ours."""
    calls = [
        node
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "stage_prefix_cache_config"
    ]
    keywords = {keyword.arg for call in calls for keyword in call.keywords}
    assert len(calls) == 1
    assert keywords
    assert keywords <= set(inspect.signature(stage_prefix_cache_config).parameters)


@pytest.mark.scenario("omni_side_by_side")
def test_the_drop_in_gives_what_the_original_gives(facts):
    """Fifteen traces, every output of every step equal; same names, same parameters."""
    assert facts["differences"] == []
    assert facts["signatures"] == []
    assert facts["names_missing"] == ["HIDDEN_KEY", "OmniPrefixCacheController", "PrefixBlockPool"]
    assert facts["steps"] >= 500
    assert facts["hit_tokens"] >= 5_000


@pytest.mark.scenario("omni_installed")
def test_the_drop_in_under_the_original_mixin(facts):
    """Installed, the wheel's runner mixin builds and drives it; uninstalled, it is as before."""
    assert facts["manager"] == "slotmirror.adapters.vllm_omni.manager"
    assert facts["wrong_rows"] == facts["wrong_rows_of_builder"] == 0
    assert facts["restored"]
    assert facts["threads_left"] == []
