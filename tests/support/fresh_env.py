"""A fresh virtual environment that holds a built wheel and its declared dependencies, no more."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from support.source_tree import ROOT

TIMEOUT_S = 100


class FreshEnv:
    """The environment in ``folder``; commands run as in a new shell, from the folder named."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.folder = folder
        self.scripts = folder / "bin"
        base = {"base": str(folder), "platbase": str(folder)}
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", vars=base))

    def run(self, *command: str | Path, cwd: Path) -> str:
        """Standard output of a command of this environment; anything but success raises."""
        return _run([str(self.scripts / command[0]), *map(str, command[1:])], cwd)

    def install(self, wheel: Path) -> None:
        """Links the wheel's dependencies from the running environment, then installs the wheel.

        Links save minutes and gigabytes of downloads. pip works offline and so fails on a
        dependency that is declared but not there; an import fails on one that is not declared.
        """
        for name in sorted(dependencies_of(_requirements_in(wheel))):
            _link(distribution(name), self.site_packages)
        pip = [sys.executable, "-m", "pip", "--python", str(self.scripts / "python")]
        pins = ["--constraint", str(ROOT / "constraints.txt")]
        _run([*pip, "install", "--no-index", *pins, str(wheel)], self.folder)


def dependencies_of(requirements: Iterable[str]) -> set[str]:
    """Names of all distributions that ``requirements`` lead to, extras only where asked for."""
    found: set[str] = set()
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *requirement.extras}:
            if (name := f"{requirement.name}[{wanted}]") not in found:
                found.add(name)
                waiting += [
                    (text, wanted) for text in distribution(requirement.name).requires or ()
                ]
    return {name.partition("[")[0] for name in found}


def _requirements_in(wheel: Path) -> list[str]:
    [metadata] = Distribution.discover(path=[str(wheel)])
    return metadata.requires or []


def _link(installed: Distribution, site_packages: Path) -> None:
    """Links every top-level entry of the distribution; shared namespace folders once."""
    entries = {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}
    for entry in sorted(entries - {"__pycache__"}):
        link = site_packages / entry
        if not link.exists():
            link.symlink_to(Path(str(installed.locate_file(entry))))


def _run(command: list[str], cwd: Path) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout
