"""The table of rules and tests is complete and up to date."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.source_tree import ROOT

SCRIPT = Path("docs") / "generate_spec_coverage.py"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script's check on a tree."""
    command = [sys.executable, str(root / SCRIPT), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_rule_has_a_test_and_the_page_says_which() -> None:
    """The committed page is what the script writes."""
    result = check(ROOT)
    assert result.returncode == 0, result.stderr


def test_a_missing_test_and_a_stale_page_are_noticed(tmp_path: Path) -> None:
    """In a tree without tests every rule lacks one; with a changed page the check fails."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    assert "rules without a test: K1, K2" in check(tmp_path).stderr
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("*.json"))
    (tmp_path / "docs" / "spec-coverage.md").write_text("stale")
    stale = check(tmp_path)
    assert (stale.returncode, "out of date" in stale.stderr) == (1, True)
