"""The changes that are tried on the core: where they apply, and what they make of the code."""

from __future__ import annotations

import ast

import pytest

from mutation.operators import sites_of
from mutation.trial import ROOT


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a is None", ["x = a is not None"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a and b", ["x = a or b"]),
        ("x = 3", ["x = 4", "x = 2"]),
        ("x = True", ["x = False"]),
        ("x = min(a)", ["x = max(a)"]),
        ("if a:\n    b()", ["if not a:\n    b()", "if a:\n    pass"]),
        ("if a == b:\n    x = c", ["if a != b:\n    x = c"]),
        ("x += y", ["pass"]),
        ("with lock:\n    x = y", ["if True:\n    x = y"]),
        ("with lock as held:\n    x = y", []),
        ("raise a", ["pass"]),
        ('logger.error("text")', []),
        ('"""A text."""', []),
        ("def f(x: Literal[3]) -> Literal[4]:\n    return x", []),
        ("x = f'{3}'", []),
    ],
)
def test_each_operator_changes_one_thing(source: str, changed: list[str]) -> None:
    """And leaves annotations, texts and messages to people alone."""
    assert [site.source() for site in sites_of(source)] == changed


def test_a_change_says_where_and_what() -> None:
    """Enough to find it."""
    [site] = sites_of("def f():\n    return a != b\n")
    assert str(site) == "2: compares otherwise: a != b  ->  a == b"


@pytest.mark.parametrize("module", sorted((ROOT / "core").glob("*.py")), ids=lambda p: p.stem)
def test_changed_modules_of_the_core_are_still_python(module) -> None:
    """Every one of them compiles, and none is the module that it was."""
    source = module.read_text()
    same = ast.unparse(ast.parse(source))
    for site in sites_of(source)[::10]:
        changed = site.source()
        compile(changed, module.name, "exec")
        assert changed != same
