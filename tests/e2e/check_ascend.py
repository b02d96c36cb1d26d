"""The shape of vllm-ascend's worker and model runner, read as syntax trees."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from slotmirror.adapters.vllm.platform_worker import PLATFORM_WORKERS
from slotmirror.adapters.vllm.worker_mixin import StageMirrorMixin

WORKER = Path(os.environ["SLOTMIRROR_ASCEND_WHEEL"]) / "vllm_ascend" / "worker"
HOOKED = {
    "init_device",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
    "sleep",
    "shutdown",
}
"""Methods of the mixin that the engine calls on every platform's worker."""


def class_named(path: Path, name: str) -> ast.ClassDef:
    """The class of that name; the test fails if the module has none."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


def fields_of(path: Path, name: str) -> set[str]:
    """Annotated fields of a class."""
    body = class_named(path, name).body
    return {
        n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


def test_the_worker_is_where_the_table_says():
    """The first name in the table, and each hooked method is the worker's own."""
    module, _, name = PLATFORM_WORKERS["npu"][0].rpartition(".")
    assert module == "vllm_ascend.worker.worker"
    methods = {
        n.name
        for n in class_named(WORKER / "worker.py", name).body
        if isinstance(n, ast.FunctionDef)
    }
    assert methods >= HOOKED
    assert set(vars(StageMirrorMixin)) >= HOOKED


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_the_hooked_calls_have_one_argument(method):
    """As the mixin passes it on."""
    worker = class_named(WORKER / "worker.py", "NPUWorker")
    function = next(n for n in worker.body if isinstance(n, ast.FunctionDef) and n.name == method)
    assert len(function.args.args) == 2


def test_the_first_runner_keeps_hidden_states_until_sampling():
    """In its execute-model state, under the name that is read."""
    assert "hidden_states" in fields_of(WORKER / "model_runner_v1.py", "ExecuteModelState")
    source = (WORKER / "model_runner_v1.py").read_text(encoding="utf-8")
    assert "self.execute_model_state = ExecuteModelState(" in source
