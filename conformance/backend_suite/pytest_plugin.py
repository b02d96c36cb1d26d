"""`pytest --pyargs slotmirror.conformance --backend NAME`: the option that names the backend.

pytest reads options before it knows where the tests are, so the option comes from a plugin that
the distribution registers. The kit is imported only where the option was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slotmirror.conformance.backend_suite import selection

_TESTS = Path(__file__).with_name("test_backend.py")


def pytest_addoption(parser: Any) -> None:
    """Register the option, unless the project under test has one of the same name."""
    try:
        parser.getgroup("slotmirror").addoption(
            "--backend",
            dest="slotmirror_backend",
            metavar="NAME",
            help="the device backend on which slotmirror's conformance kit runs",
        )
    except ValueError:
        return


def pytest_configure(config: Any) -> None:
    """Tell the kit's own test module which backend it is about."""
    selection.backend_name = config.getoption("slotmirror_backend", None) or ""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The kit's own test module needs an installed backend: say so once, not once per check."""
    if not any(_TESTS.samefile(item.path) for item in items):
        return
    import pytest

    from slotmirror.core.errors import BackendError
    from slotmirror.core.registry import backend_class

    if not selection.backend_name:
        raise pytest.UsageError("the conformance kit needs --backend NAME (slotmirror backends)")
    try:
        backend_class(selection.backend_name)
    except BackendError as error:
        raise pytest.UsageError(str(error)) from error
