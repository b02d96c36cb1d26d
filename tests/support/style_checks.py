"""Checks of size and wording: long files and functions, open-work markers, machine paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60

# The bracketed letters keep this file from matching itself.
_OPEN_WORK = re.compile(r"\b(?:T[O]DO|FI[X]ME|HA[C]K|X[X]X)\b")
# An absolute path into somebody's machine; `src/tmp/` and `https://host/home/` are none.
_MACHINE_PATH = re.compile(r"(?<![\w.~}\])-])/(?:home|root|tmp|work|mnt|farm|opt|Users)/[\w.-]")


def long_file(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines, at most {FILE_LINES_MAX}"] if lines > FILE_LINES_MAX else []


def long_functions(path: str, source: str) -> list[str]:
    """Functions over the limit, counted from ``def`` to the last line, docstring included."""
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def open_work_markers(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {text}" for line, text in _matches(_OPEN_WORK, source)]


def machine_paths(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {text}" for line, text in _matches(_MACHINE_PATH, source)]


def _matches(pattern: re.Pattern[str], source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), start=1):
        if found := pattern.search(line):
            yield number, found.group()
