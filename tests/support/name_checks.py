"""Checks of the names and texts in a module's syntax tree."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

# Texts fall apart into runs of letters, and these into their CamelCase parts: the vendor in
# `CudaStream` and `npu:0` is found, the same letters in `input` and `ownership` are not.
_LETTERS = re.compile(r"[A-Za-z]+")
_CAMEL_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def vendor_names(path: str, source: str, vendors: frozenset[str]) -> list[str]:
    """Vendors in names, attributes, keywords, imports and texts; docstrings may cite sources."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        f"{path}:{getattr(node, 'lineno', 0)}: {text!r} names {word}"
        for node in ast.walk(tree)
        if id(node) not in docstrings
        for text in _texts(node)
        for word in sorted(_words(text) & vendors)
    ]


def _texts(node: ast.AST) -> Iterator[str]:
    """The node's own fields that are text: ids, attributes, arguments, aliases, constants."""
    for _, field in ast.iter_fields(node):
        if isinstance(field, str):
            yield field
        elif isinstance(field, list):
            yield from (item for item in field if isinstance(item, str))


def _words(text: str) -> set[str]:
    whole = _LETTERS.findall(text)
    parts = [part for word in whole for part in _CAMEL_PART.findall(word)]
    return {word.lower() for word in whole + parts}


def listed_names(source: str) -> list[str]:
    """The names in the module's ``__all__``, as written; empty where it has none."""
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value: Any = statement.value  # type: ignore[attr-defined]
            return list(ast.literal_eval(value))
    return []


def names_listed_twice(listed: Iterable[Iterable[str]]) -> list[str]:
    """Names that several lists, or one list several times, contain."""
    counts = Counter(name for names in listed for name in names)
    return sorted(name for name, count in counts.items() if count > 1)


def facade_differences(facade: ModuleType) -> list[str]:
    """Where ``__all__`` and what the facade binds disagree; submodules are no public names."""
    listed = list(facade.__all__)
    missing = [f"{name} is listed, not bound" for name in listed if not hasattr(facade, name)]
    unlisted = [
        f"{name} is bound, not listed"
        for name, value in vars(facade).items()
        if not name.startswith("_") and name not in listed and not _is_import_machinery(value)
    ]
    return sorted(missing + unlisted)


def _is_import_machinery(value: object) -> bool:
    return isinstance(value, ModuleType) or type(value).__module__ == "__future__"
