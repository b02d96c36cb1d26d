"""The shipped device backends over the stand-in.

Imported late: this file is read before torch may be, whose thread count tests/conftest.py sets.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.stand_in.backends import OnStandIn, StandInCuda


@pytest.fixture(params=["Cuda", "Npu", "Torch"], ids=str.lower)
def backend(request: pytest.FixtureRequest) -> Iterator[OnStandIn]:
    """Each of them in turn, active in the test's thread."""
    instance = _new(request.param)
    with instance.mode:
        yield instance


@pytest.fixture
def cuda() -> Iterator[StandInCuda]:
    """The cuda backend alone."""
    instance = _new("Cuda")
    with instance.mode:
        yield instance


def _new(name: str):
    return getattr(importlib.import_module("support.stand_in.backends"), f"StandIn{name}")()
