"""Where the repository's files are: linked packages, shipped modules, every text file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

TEXT_SUFFIXES = frozenset({"", ".cfg", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"})

# What builds and tools leave in a checkout; .gitignore names the same.
GENERATED = frozenset({"__pycache__", "build", "dist", "out"})


class Module(NamedTuple):
    """One shipped source file; ``name`` is dotted and relative to ``slotmirror``."""

    name: str
    path: Path

    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")


def linked_packages(root: Path = ROOT) -> list[str]:
    """The top-level folders that ``src/slotmirror`` links to, sorted."""
    return sorted(entry.name for entry in import_folder(root).iterdir() if entry.is_symlink())


def import_folder(root: Path = ROOT) -> Path:
    return root / "src" / "slotmirror"


def shipped_modules(root: Path = ROOT) -> list[Module]:
    """Every module the wheel must hold, each once and by its real path; the facade is ``""``."""
    modules = [
        Module(dotted(path, root), path)
        for package in linked_packages(root)
        for path in python_files(root / package)
    ]
    facade = import_folder(root)
    # `rglob` does not enter links, so the linked packages are not met a second time.
    modules += [Module(dotted(path, facade), path) for path in python_files(facade)]
    return sorted(modules)


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def dotted(path: Path, folder: Path) -> str:
    """The module name of ``path`` seen from ``folder``; a package's ``__init__`` is the package."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def text_files(root: Path = ROOT) -> list[Path]:
    """Every text file of the checkout: no generated, hidden (but ``.ci``) or linked folder."""
    return sorted(path for path in _walk(root) if path.suffix in TEXT_SUFFIXES)


def markdown_files(root: Path = ROOT) -> list[Path]:
    return [path for path in text_files(root) if path.suffix == ".md"]


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_symlink() or is_generated(entry.name):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry


def is_generated(name: str) -> bool:
    """Whether a file or folder of this name is made by a build or a tool, or is git's own."""
    hidden = name.startswith(".") and name not in {".ci", ".gitignore"}
    return hidden or name in GENERATED or name.endswith(".egg-info")
