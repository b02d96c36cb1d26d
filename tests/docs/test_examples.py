"""Every example script runs as it stands: no argument, any folder."""

from __future__ import annotations

from support.scripts import script_error
from support.source_tree import ROOT


def failing_examples(examples, folder):
    return [
        error
        for example in sorted(examples.glob("*.py"))
        if (error := script_error(example, folder))
    ]


def test_every_example_runs(tmp_path):
    """Each ``examples/*.py`` ends without error or warning."""
    assert failing_examples(ROOT / "examples", tmp_path) == []


def test_a_planted_failing_example_is_caught(tmp_path):
    """The report names the script and shows what it printed; the passing one is not in it."""
    (tmp_path / "good.py").write_text("print('fine')")
    (tmp_path / "bad.py").write_text("print('before'); raise SystemExit(3)")
    (tmp_path / "warns.py").write_text("import warnings; warnings.warn('late', stacklevel=1)")
    bad, warns = failing_examples(tmp_path, tmp_path)
    assert "bad.py: exit code 3\nbefore" in bad
    assert "UserWarning: late" in warns
