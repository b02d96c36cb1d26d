"""The wheel and the source distribution hold the tree's modules, and nothing else."""

from __future__ import annotations

import tarfile
import zipfile

import pytest

from support.source_tree import import_folder, shipped_modules

pytestmark = pytest.mark.packaging


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shipped_paths(tree):
    """Where each module of the tree lies in a wheel, with its text."""
    facade = import_folder(tree)
    return {
        str(
            module.path.relative_to(facade.parent)
            if module.path.is_relative_to(facade)
            else f"slotmirror/{module.path.relative_to(tree)}"
        ): module.path.read_bytes()
        for module in shipped_modules(tree)
    }


def test_the_wheel_holds_the_modules_of_the_tree(tree, wheel):
    """Each ``.py`` of the linked folders and the facade is in the wheel, unchanged; no other is."""
    built = {name: data for name, data in contents(wheel).items() if name.endswith(".py")}
    assert built == shipped_paths(tree)


def test_the_wheel_is_typed_and_licensed(tree, wheel):
    """``py.typed`` and the licence text are in the wheel; nothing lies beside the package."""
    built = contents(wheel)
    assert "slotmirror/py.typed" in built
    [licence] = [
        data for name, data in built.items() if name.endswith("dist-info/licenses/LICENSE")
    ]
    assert licence == (tree / "LICENSE").read_bytes()
    tops = {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in built}
    assert tops == {"slotmirror"}


def test_the_source_distribution_is_enough_to_build(wheel, wheel_of_sdist):
    """A wheel built from the source distribution alone equals the one built from the tree."""
    assert contents(wheel_of_sdist) == contents(wheel)


def test_the_source_distribution_has_files_not_links(sdist):
    """Links into a checkout would dangle elsewhere: the archive holds none."""
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []


def test_a_planted_unreachable_module_is_caught(tmp_path):
    """A module in a folder without ``__init__.py`` is the tree's, though no wheel gets it."""
    (tmp_path / "src" / "slotmirror").mkdir(parents=True)
    (tmp_path / "core" / "no_package").mkdir(parents=True)
    (tmp_path / "src" / "slotmirror" / "core").symlink_to("../../core")
    (tmp_path / "core" / "no_package" / "lost.py").write_text("x = 1")
    assert shipped_paths(tmp_path) == {"slotmirror/core/no_package/lost.py": b"x = 1"}
