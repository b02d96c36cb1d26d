"""The benchmarks keep up with the core: what they name of it exists."""

from __future__ import annotations

import subprocess
import sys

from support.source_tree import ROOT


def test_the_parts_of_a_step_are_found_and_drawn(tmp_path):
    """A few steps: parts, JSON, a timeline; a part that is gone would end the run."""
    figures, picture = tmp_path / "figures.json", tmp_path / "step.svg"
    script = ROOT / "benchmarks" / "step_cost.py"
    done = subprocess.run(
        [sys.executable, str(script), "--requests", "2", "--steps", "10",
         "--json", str(figures), "--profile", str(picture)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "append to log" in done.stdout
    assert figures.read_text().startswith("{")
    assert picture.read_text().startswith("<svg")
