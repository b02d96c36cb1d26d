"""Running a documented script as a reader would, with warnings as errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 100


def script_error(script: Path, folder: Path) -> str:
    """What ``script`` printed when it failed, run in ``folder``; empty when it succeeded."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return f"{script.name}: exit code {done.returncode}\n{done.stdout}" if done.returncode else ""
