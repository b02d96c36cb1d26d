"""Size and wording limits, over every file they are about."""

from __future__ import annotations

import pytest

from support.source_tree import ROOT, python_files, shipped_modules, text_files
from support.style_checks import (
    CORE_CODE_LINES_MAX,
    FILE_LINES_MAX,
    FUNCTION_LINES_MAX,
    code_lines,
    long_file,
    long_functions,
    machine_paths,
    open_work_markers,
)


def _violations(check, paths):
    return [
        violation
        for path in paths
        for violation in check(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


def test_no_python_file_is_long():
    """No Python file of the repository, tests included, is over the limit."""
    assert _violations(long_file, [path for path in text_files() if path.suffix == ".py"]) == []


def test_no_shipped_function_is_long():
    """No function in a shipped package is over the limit."""
    assert _violations(long_functions, [module.path for module in shipped_modules()]) == []


def test_core_stays_small():
    """core/ as a whole is under its limit: what is added pays for its place."""
    files = python_files(ROOT / "core")
    assert sum(code_lines(path.read_text(encoding="utf-8")) for path in files) < CORE_CODE_LINES_MAX


def test_only_code_is_counted():
    """Docstrings, comments, imports and blank lines are free; each line of a statement counts."""
    free = '"""Doc.\n\nMore."""\nimport os\nfrom a import (\n    b,\n)\n\n# why\n'
    assert code_lines(free) == 0
    assert code_lines(free + "x = f(\n    1,\n)  # why\ndef f():\n    '''Doc.'''\n    pass\n") == 5


@pytest.mark.parametrize("check", [open_work_markers, machine_paths])
def test_every_text_file_is_clean(check):
    """No text file carries an open-work marker or a path of somebody's machine."""
    assert _violations(check, text_files()) == []


def test_a_planted_long_file_is_caught():
    """The limit itself passes, one line more does not."""
    assert long_file("x.py", "x = 1\n" * FILE_LINES_MAX) == []
    assert len(long_file("x.py", "x = 1\n" * (FILE_LINES_MAX + 1))) == 1


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n"])
def test_a_planted_long_function_is_caught(head):
    """The limit counts the ``def`` line; a method inside a class is seen too."""
    body = "    x = 1\n" * (FUNCTION_LINES_MAX - 1)
    assert long_functions("x.py", head + body) == []
    assert len(long_functions("x.py", head + body + "    x = 1\n")) == 1
    nested = "".join(f"    {line}\n" for line in (head + body + "    x = 1").splitlines())
    assert len(long_functions("x.py", f"class C:\n{nested}")) == 1


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" * 3])
def test_a_planted_open_work_marker_is_caught(word):
    """A marker is found as a word of its own, wherever it stands."""
    assert open_work_markers("x.md", f"first\n# {word}: later") == [f"x.md:2: {word}"]
    assert open_work_markers("x.md", f"{word}LIST") == []


@pytest.mark.parametrize("folder", ["home", "tmp", "work", "Users"])
def test_a_planted_machine_path_is_caught(folder):
    """Absolute paths into a machine are found; relative ones and addresses are not."""
    assert len(machine_paths("x.md", f"see `/{folder}/main/file`")) == 1
    assert machine_paths("x.md", f"src/{folder}/file https://host.org/{folder}/page") == []


def test_every_python_file_is_looked_at():
    """The walk over text files meets every module and every test, each once."""
    looked_at = text_files()
    assert len(looked_at) == len(set(looked_at))
    assert {module.path for module in shipped_modules()} <= set(looked_at)
    assert set(python_files(ROOT / "tests")) <= set(looked_at)
