"""Checks of size and wording: long files and functions, open-work markers, machine paths."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

FILE_LINES_MAX = 350
FUNCTION_LINES_MAX = 60
CORE_CODE_LINES_MAX = 2450

_LAYOUT_TOKENS = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}

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


def code_lines(source: str) -> int:
    """Lines that hold code: no blank ones, no comments, docstrings or imports."""
    tree = ast.parse(source)
    silent = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    loud = {
        line
        for token in tokens
        if token.type not in _LAYOUT_TOKENS
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(loud - silent)


def open_work_markers(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {text}" for line, text in _matches(_OPEN_WORK, source)]


def machine_paths(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {text}" for line, text in _matches(_MACHINE_PATH, source)]


def _matches(pattern: re.Pattern[str], source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), start=1):
        if found := pattern.search(line):
            yield number, found.group()
