"""The distribution files and the environment that the packaging tests look at, built once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.fresh_env import FreshEnv
from support.source_tree import ROOT, is_generated


def build(source: Path, outdir: Path, *what: str) -> Path:
    """Builds ``source`` with the development environment's setuptools; the one file it makes."""
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(outdir)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = outdir.iterdir()
    return built


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of the checkout without what earlier builds left: old lists mislead setuptools."""
    copy = tmp_path_factory.mktemp("tree") / "slotmirror"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=lambda _, names: filter(is_generated, names))
    return copy


@pytest.fixture(scope="session")
def wheel(tree, tmp_path_factory):
    """The wheel built from the tree."""
    return build(tree, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="session")
def sdist(tree, tmp_path_factory):
    """The source distribution built from the tree."""
    return build(tree, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="session")
def wheel_of_sdist(sdist, tmp_path_factory):
    """The wheel built from nothing but the source distribution."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    [source] = unpacked.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel_of_sdist"), "--wheel")


@pytest.fixture(scope="session")
def fresh_env(wheel, tmp_path_factory):
    """A new environment with the wheel installed."""
    env = FreshEnv(tmp_path_factory.mktemp("fresh") / "env")
    env.install(wheel)
    return env
