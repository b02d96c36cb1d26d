"""Trying a change: a copy of the repository in which one module is replaced, and the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("core", "backends", "conformance", "engine", "kvcache", "adapters", "src", "tests")
_SLOWER_MAX = 5

Commands = tuple[tuple[str, ...], ...]


def commands(tests: list[str], schedules: int) -> Commands:
    """The tests, then so many schedules of the explorer with and without a fault; 0: none."""
    pytest = ("-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider", "--no-header")
    explore = ("-m", "slotmirror", "explore", "--schedules", str(schedules), "--first-seed", "1")
    return (pytest, explore, (*explore, "--faults")) if schedules else (pytest,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`noticed_by` is the command that failed or did not end, None for a survivor."""

    noticed_by: str | None
    hung: bool = False


class Workspace:
    """A copy of the repository. One trial at a time."""

    def __init__(self, folder: Path, module: str, to_run: Commands, limit_s: float) -> None:
        self._folder = folder
        self._module = folder / module
        self._to_run = to_run
        self._limit_s = limit_s
        for name in _FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def unchanged_s(self) -> float:
        """Seconds that the tests take without a change, which they must pass; sets the limit."""
        began_s = time.monotonic()
        verdict = self.run()
        if verdict.noticed_by is not None:
            raise SystemExit(f"fails without any change: {verdict.noticed_by}")
        spent_s = time.monotonic() - began_s
        self._limit_s = spent_s * _SLOWER_MAX
        return spent_s

    def try_change(self, source: str) -> Verdict:
        """Run with the module replaced; it is as before afterwards."""
        original = self._module.read_text()
        self._module.write_text(source)
        try:
            return self.run()
        finally:
            self._module.write_text(original)

    def run(self) -> Verdict:
        """Run the commands until one fails."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for command in self._to_run:
            try:
                done = subprocess.run(
                    [sys.executable, *command],
                    cwd=self._folder,
                    env=environment,
                    capture_output=True,
                    check=False,
                    timeout=self._limit_s,
                )
            except subprocess.TimeoutExpired:
                return Verdict(command[1], hung=True)
            if done.returncode:
                return Verdict(command[1])
        return Verdict(None)

    @property
    def limit_s(self) -> float:
        """How long one command may take."""
        return self._limit_s
