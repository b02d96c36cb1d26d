"""Checks of what a module imports, on its syntax tree; each returns one line per violation."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

PROJECT = "slotmirror"


class Imported(NamedTuple):
    line: int
    name: str


def absolute_imports(source: str) -> Iterator[Imported]:
    """Every imported name in full: ``from a.b import c`` gives ``a.b.c``; lazy imports count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                suffix = "" if alias.name == "*" else f".{alias.name}"
                yield Imported(node.lineno, node.module + suffix)
        elif isinstance(node, ast.Call):
            yield from _dynamic_import(node)


def _dynamic_import(call: ast.Call) -> Iterator[Imported]:
    """``import_module("a.b")`` and ``__import__("a.b")`` with the name written out."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in {"import_module", "__import__"} and call.args:
        target = call.args[0]
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            yield Imported(call.lineno, target.value)


def relative_imports(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: relative import; write it absolute, from {PROJECT}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def bare_package_imports(path: str, source: str, packages: Collection[str]) -> list[str]:
    """Imports that name a linked folder as a package of its own (``import core``)."""
    return [
        f"{path}:{line}: imports {name}; the package is {PROJECT}.{name}"
        for line, name in absolute_imports(source)
        if name.split(".")[0] in packages
    ]


def wrong_direction(
    path: str, source: str, package: str, may_import: Mapping[str, Collection[str] | None]
) -> list[str]:
    """Imports that ``package`` may not have; ``may_import[package]`` is None for "anything".

    An allowed name covers what lies below it: ``core.backend`` allows ``core.backend.Probe``.
    """
    if package not in may_import:
        return [f"{path}: package {package} has no row in the table of the layout test"]
    allowed = may_import[package]
    if allowed is None:
        return []
    return [
        f"{path}:{line}: {package or PROJECT} may not import {name}"
        for line, name in absolute_imports(source)
        if name.split(".")[0] == PROJECT
        and not _covered(name.removeprefix(PROJECT).removeprefix("."), (package, *allowed))
    ]


def _covered(name: str, allowed: Collection[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed if prefix)


def reserved_imports(path: str, source: str, only_in: Mapping[str, Collection[str]]) -> list[str]:
    """Imports of a module that only the paths in ``only_in[module]`` may have."""
    return [
        f"{path}:{line}: {root} is imported by {', '.join(sorted(only_in[root]))} alone"
        for line, name in absolute_imports(source)
        if (root := name.split(".")[0]) in only_in and path not in only_in[root]
    ]
