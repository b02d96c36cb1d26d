"""Public names are listed once, in the facade, and each can be imported."""

from __future__ import annotations

import importlib
import tomllib
from types import ModuleType

from support.name_checks import facade_differences, listed_names, names_listed_twice
from support.source_tree import ROOT, import_folder, shipped_modules


def test_the_facade_lists_what_it_binds():
    """``slotmirror.__all__`` names every public object of the facade, and nothing else."""
    assert facade_differences(importlib.import_module("slotmirror")) == []


def test_the_list_is_written_out():
    """``__all__`` is a literal that tools can read, and it is not empty."""
    listed = listed_names((import_folder() / "__init__.py").read_text(encoding="utf-8"))
    assert listed
    assert listed == list(importlib.import_module("slotmirror").__all__)


def test_the_version_is_that_of_the_distribution():
    """``slotmirror.__version__`` and pyproject.toml, which pip reads, say the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert importlib.import_module("slotmirror").__version__ == project["version"]


def test_no_name_is_listed_in_two_places():
    """Over all shipped modules a name stands in one ``__all__``, once."""
    assert names_listed_twice(listed_names(module.source()) for module in shipped_modules()) == []


def test_a_planted_difference_is_caught():
    """A name that is only listed and one that is only bound are both reported."""
    facade = ModuleType("facade")
    exec("import sys\n__all__ = ['Listed', 'Both']\nBoth = Unlisted = _private = 1", vars(facade))
    assert facade_differences(facade) == [
        "Listed is listed, not bound",
        "Unlisted is bound, not listed",
    ]


def test_a_planted_second_listing_is_caught():
    """A name in two lists, or twice in one, is reported; the list is found in either spelling."""
    first = listed_names("x = 1\n__all__ = ('A', 'B', 'B')")
    second = listed_names("__all__: list[str] = ['A', 'C']")
    assert names_listed_twice([first, second]) == ["A", "B"]
    assert listed_names("x = ['D']") == []
