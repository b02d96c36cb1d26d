"""torch_npu's Python sources, read out of its wheel; nothing of it is installed or imported."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from functools import cached_property
from pathlib import Path

import torch

DOWNLOAD_LIMIT_S = 100


class NotReachable(Exception):
    """The package index has no such wheel for this Python and torch, or cannot be reached."""


def wheel_for_this_torch(cache: Path) -> Path:
    """The torch_npu wheel of this torch's minor version, downloaded into `cache` once."""
    minor = ".".join(str(torch.__version__).split(".")[:2])
    kept = sorted(cache.glob(f"torch_npu-{minor}.*.whl"))
    if kept:
        return kept[-1]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(cache), f"torch_npu=={minor}.*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotReachable(f"no answer within {DOWNLOAD_LIMIT_S} s") from error
    if done.returncode:
        raise NotReachable(done.stderr.strip().splitlines()[-1])
    return sorted(cache.glob(f"torch_npu-{minor}.*.whl"))[-1]


class NpuSources:
    """The names of `torch.npu`, followed through its modules' imports as syntax trees."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel

    @cached_property
    def _trees(self) -> dict[str, ast.Module]:
        with zipfile.ZipFile(self._wheel) as archive:
            return {
                name.removeprefix("torch_npu/npu/").removesuffix(".py"): ast.parse(
                    archive.read(name)
                )
                for name in archive.namelist()
                if name.startswith("torch_npu/npu/") and name.endswith(".py")
            }

    def find(self, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """The definition that `torch.npu.NAME` leads to; None if it has no such name."""
        public = self._exported | {
            alias.asname or alias.name
            for node in self._trees["__init__"].body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if name not in public:
            return None
        found = [
            node
            for tree in self._trees.values()
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        return found[0] if found else None

    @property
    def _exported(self) -> set[str]:
        for node in self._trees["__init__"].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return set(ast.literal_eval(node.value))
        return set()


def parameters_of(node: ast.FunctionDef | ast.ClassDef) -> dict[str, str | None]:
    """Parameter → its default as source text, None where it has none; a class's are `__new__`'s."""
    if isinstance(node, ast.ClassDef):
        makers = [
            item
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name in ("__new__", "__init__")
        ]
        arguments = makers[0].args
        names = [argument.arg for argument in arguments.args][1:]
    else:
        arguments = node.args
        names = [argument.arg for argument in arguments.args]
    defaults: list[ast.expr | None] = [*arguments.defaults]
    padded = [None] * (len(names) - len(defaults)) + defaults
    return {
        name: None if default is None else ast.unparse(default)
        for name, default in zip(names, padded, strict=True)
    }


def methods_of(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Names of a class's methods."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {item.name for item in body if isinstance(item, ast.FunctionDef)}
