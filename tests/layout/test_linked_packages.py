"""The top-level folders are reached as slotmirror's packages, and only so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT, import_folder, linked_packages


def bare_import_error(folder: Path, name: str) -> str | None:
    """What ``import name`` from ``folder`` says when it fails; None when it succeeds."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stderr if done.returncode else None


@pytest.mark.parametrize("package", linked_packages())
def test_a_bare_import_is_refused_with_the_right_name(package):
    """``import core`` from the repository root fails and names ``slotmirror.core``."""
    error = bare_import_error(ROOT, package)
    assert error is not None
    assert error.splitlines()[-1].startswith("ImportError")
    assert f"write `import slotmirror.{package}`" in error


def test_a_planted_package_without_guard_is_caught(tmp_path):
    """Without the guard the bare import succeeds, and the check says so."""
    (tmp_path / "unguarded").mkdir()
    (tmp_path / "unguarded" / "__init__.py").touch()
    assert bare_import_error(tmp_path, "unguarded") is None


def unlinked_packages(root: Path) -> list[str]:
    """Top-level folders that are packages and have no link: the wheel would lack them."""
    packages = {init.parent.name for init in root.glob("*/__init__.py")}
    return sorted(packages - set(linked_packages(root)))


def unusual_links(root: Path) -> list[str]:
    """Links in the import folder that are not ``name -> ../../name``, to a package."""
    return [
        f"{name} -> {target}"
        for name in linked_packages(root)
        if (target := os.readlink(import_folder(root) / name)) != f"../../{name}"
        or not (root / name / "__init__.py").is_file()
    ]


def test_every_package_is_linked():
    """Each top-level package has its relative link, so the checkout can be moved."""
    assert unlinked_packages(ROOT) == []
    assert unusual_links(ROOT) == []


def test_a_planted_missing_or_absolute_link_is_caught(tmp_path):
    """A package without link, an absolute link and a dangling link are reported."""
    import_folder(tmp_path).mkdir(parents=True)
    for name in ("linked", "absolute", "unlinked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (import_folder(tmp_path) / "linked").symlink_to("../../linked")
    (import_folder(tmp_path) / "absolute").symlink_to(tmp_path / "absolute")
    (import_folder(tmp_path) / "dangling").symlink_to("../../dangling")
    assert unlinked_packages(tmp_path) == ["unlinked"]
    assert unusual_links(tmp_path) == [
        f"absolute -> {tmp_path / 'absolute'}",
        "dangling -> ../../dangling",
    ]
