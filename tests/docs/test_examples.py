"""Every example script runs as it stands: no argument, any folder."""

from __future__ import annotations

import pytest

from support.scripts import script_error
from support.source_tree import ROOT

# Examples on engines that are no dependency: `make e2e` has them, and runs these.
ON_AN_ENGINE = {"vllm_hidden_states.py": "vllm"}


def failing_examples(examples, folder):
    return [
        error
        for example in sorted(examples.glob("*.py"))
        if example.name not in ON_AN_ENGINE and (error := script_error(example, folder))
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


@pytest.mark.parametrize(("example", "engine"), ON_AN_ENGINE.items())
def test_an_example_on_an_engine_is_left_to_its_own_environment(example, engine):
    """It exists and compiles; it is not run without its engine, and says so."""
    compile((ROOT / "examples" / example).read_text(encoding="utf-8"), example, "exec")
    pytest.skip(f"{example} needs {engine}: run by make e2e")
