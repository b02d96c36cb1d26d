"""Packages import each other in one direction: ``engine -> core -> backend interface``."""

from __future__ import annotations

import pytest

from support.import_checks import bare_package_imports, relative_imports, wrong_direction
from support.source_tree import ROOT, linked_packages, shipped_modules

# Per package: what it may import from slotmirror besides itself; None stands for everything.
# "" is the facade and must not pull in an engine; errors are part of the backend's contract.
# Nothing but the command line lists conformance, so nothing else may import it.
ADAPTER_TOOLS = ("adapters.block_tables", "adapters.gate", "adapters.stand_in")
MAY_IMPORT = {
    "": {"core", *ADAPTER_TOOLS},
    "__main__": {"cli"},
    "cli": None,
    "core": (),
    "backends": {"core.backend", "core.errors"},
    "kvcache": (),
    "engine": {"core", "kvcache", "adapters.block_tables"},
    "adapters": {"core"},
    "conformance": None,
}

PLANTED = [
    ("core", "from slotmirror.engine.scheduler import Scheduler"),
    ("core", "from slotmirror import PrefixCacheManager"),
    ("core", "def late():\n    import slotmirror.backends.cpu_ref"),
    ("core", "importlib.import_module('slotmirror.backends.cpu_ref')"),
    ("backends", "from slotmirror.core import manager"),
    ("backends", "from slotmirror.core.backend_extras import helper"),
    ("backends", "from slotmirror.core import *"),
    ("kvcache", "import slotmirror.core.errors"),
    ("engine", "from slotmirror.backends import cpu_ref"),
    ("engine", "from slotmirror import conformance"),
    ("engine", "from slotmirror.adapters.vllm import mirror"),
    ("adapters", "from slotmirror.engine.scheduler import Scheduler"),
    ("", "from slotmirror.cli import app"),
]

LEGAL = [
    ("core", "from slotmirror.core import errors\nimport numpy"),
    (
        "backends",
        "from slotmirror.core.backend import DeviceBackend\nimport slotmirror.core.errors",
    ),
    ("engine", "from slotmirror.kvcache.block_pool import BlockPool"),
    ("engine", "from slotmirror.adapters.block_tables import BlockTables"),
    ("cli", "from slotmirror.conformance import suite"),
]


def test_every_package_keeps_to_the_direction():
    """No shipped module imports a package that the table does not grant it."""
    assert [
        violation
        for module in shipped_modules()
        for violation in wrong_direction(
            str(module.path.relative_to(ROOT)),
            module.source(),
            module.name.split(".")[0],
            MAY_IMPORT,
        )
    ] == []


@pytest.mark.parametrize(("package", "source"), PLANTED)
def test_a_planted_wrong_import_is_caught(package, source):
    """Each forbidden edge, however it is written, gives exactly one violation."""
    [violation] = wrong_direction("x.py", source, package, MAY_IMPORT)
    assert f"{package or 'slotmirror'} may not import slotmirror" in violation


def test_a_package_outside_the_table_is_caught():
    """A new package must be given its row before it passes."""
    [violation] = wrong_direction("x.py", "import numpy", "newcomer", MAY_IMPORT)
    assert "newcomer has no row" in violation


@pytest.mark.parametrize(("package", "source"), LEGAL)
def test_a_granted_import_passes(package, source):
    """Imports along the arrows, and of other distributions, are no violations."""
    assert wrong_direction("x.py", source, package, MAY_IMPORT) == []


def test_all_imports_are_absolute():
    """No module has a relative import: behind the links it would name another package."""
    assert [
        violation
        for module in shipped_modules()
        for violation in relative_imports(str(module.path.relative_to(ROOT)), module.source())
    ] == []


@pytest.mark.parametrize("source", ["from . import x", "from ..core import y"])
def test_a_planted_relative_import_is_caught(source):
    """Every level of relative import is reported."""
    assert len(relative_imports("x.py", source)) == 1


def test_linked_folders_are_imported_through_slotmirror():
    """No module writes ``import core``: that would be a second copy of the package."""
    packages = linked_packages()
    assert [
        violation
        for module in shipped_modules()
        for violation in bare_package_imports(
            str(module.path.relative_to(ROOT)), module.source(), packages
        )
    ] == []


@pytest.mark.parametrize("source", ["import core.errors", "from kvcache import block_pool"])
def test_a_planted_bare_import_is_caught(source):
    """The report names the package to import instead."""
    [violation] = bare_package_imports("x.py", source, {"core", "kvcache"})
    assert "the package is slotmirror." in violation
