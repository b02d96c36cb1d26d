"""The changes: each place of a module where an operator applies, and the module with it applied.

Works on the syntax tree, so that it follows the code wherever it goes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[ast.AST], ast.AST]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SILENT = ("logger", "warnings")
"""Statements that only tell people something; nothing is to notice that they are gone."""


Path = tuple[tuple[str, int | None], ...]
"""The way from a module to a node: fields, and indices in those that are lists."""


@dataclass(frozen=True, slots=True)
class Site:
    """One change: the line, what is done there, the code before and after it."""

    line: int
    operator: str
    before: str
    after: str
    _tree: ast.AST
    _path: Path
    _change: Change

    def source(self) -> str:
        """The whole module with the change."""
        changed = copy.deepcopy(self._tree)
        after = self._change(_at(changed, self._path))
        _put(changed, self._path, after)
        return ast.unparse(ast.fix_missing_locations(changed))

    def __str__(self) -> str:
        return f"{self.line}: {self.operator}: {self.before}  ->  {self.after}"


def sites_of(source: str) -> list[Site]:
    """Every change of a module, in the order of its lines."""
    tree = ast.parse(source)
    found = []
    for path, node in _visited(tree, ()):
        for operator, change in _changes(node):
            after = ast.fix_missing_locations(change(copy.deepcopy(node)))
            found.append(
                Site(
                    line=getattr(node, "lineno", 0),
                    operator=operator,
                    before=_first_line(node),
                    after=_first_line(after),
                    _tree=tree,
                    _path=path,
                    _change=change,
                )
            )
    return sorted(found, key=lambda site: site.line)


def _visited(node: ast.AST, path: Path) -> Iterator[tuple[Path, ast.AST]]:
    """Every node that may be changed, with the way to it; no annotations, texts or imports."""
    yield path, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "decorator_list", "bases"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not isinstance(child, (ast.JoinedStr, ast.Import)):
                where = index if isinstance(value, list) else None
                yield from _visited(child, (*path, (name, where)))


def _at(tree: ast.AST, path: Path) -> ast.AST:
    for name, index in path:
        value = getattr(tree, name)
        tree = value if index is None else value[index]
    return tree


def _put(tree: ast.AST, path: Path, node: ast.AST) -> None:
    name, index = path[-1]
    parent = _at(tree, path[:-1])
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).split("\n", 1)[0]


# -- what can be changed in a node -----------------------------------------------------------------


def _changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "compares otherwise", _swapped_comparison
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "computes otherwise", _swapped_arithmetic
    elif isinstance(node, ast.BoolOp):
        yield "joins otherwise", _swapped_join
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", lambda n: _constant(n, 1)
        yield "one less", lambda n: _constant(n, -1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "the contrary", _contrary
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield "chooses otherwise", lambda n: ast.Name(_NAMES[_name(n)], ast.Load())
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and not _is_comparison(node.test):
        yield "negates the condition", _negated
    elif isinstance(node, (ast.Expr, ast.AugAssign, ast.Raise)) and not _is_silent(node):
        yield "drops the statement", lambda _: ast.Pass()
    elif isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
        yield "drops the context", _without_context


def _is_comparison(node: ast.expr) -> bool:
    """Whether swapping the comparison negates it already."""
    opposite = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], opposite)


def _is_silent(node: ast.AST) -> bool:
    """A docstring or another constant, the `...` of a protocol, or a word to people."""
    if not isinstance(node, ast.Expr):
        return False
    if not isinstance(node.value, ast.Call):
        return not isinstance(node.value, (ast.Yield, ast.YieldFrom))
    return ast.unparse(node.value.func).split(".")[0] in _SILENT


def _name(node: ast.AST) -> str:
    assert isinstance(node, ast.Name)
    return node.id


def _swapped_comparison(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops = [_COMPARISONS[type(node.ops[0])]()]
    return node


def _swapped_arithmetic(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BinOp)
    node.op = _ARITHMETIC[type(node.op)]()
    return node


def _swapped_join(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _constant(node: ast.AST, by: int) -> ast.AST:
    assert isinstance(node, ast.Constant)
    return ast.Constant(node.value + by)


def _contrary(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    return ast.Constant(not node.value)


def _negated(node: ast.AST) -> ast.AST:
    assert isinstance(node, (ast.If, ast.While, ast.IfExp))
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _without_context(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.With)
    return ast.If(ast.Constant(True), node.body, [])
