"""What a check is, and how it fails or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from slotmirror.conformance.backend_suite.values import bytes_of
from slotmirror.conformance.backend_suite.workbench import Workbench

Run: TypeAlias = Callable[[Workbench], None]


class CheckFailed(AssertionError):
    """The backend broke its contract; the text says how."""


class Refused(Exception):
    """A check that cannot be made here; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One sentence of the contract: `name` states it, `run` raises `CheckFailed` if it is wrong."""

    name: str
    text: str
    run: Run


def checks_of(*functions: Run) -> tuple[Check, ...]:
    """The functions as checks: their names say what must hold, their docstrings say it in full."""
    return tuple(Check(f.__name__, (f.__doc__ or "").strip(), f) for f in functions)


def require(condition: object, text: str) -> None:
    """Fail with `text` unless `condition`."""
    if not condition:
        raise CheckFailed(text)


def require_bytes(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail unless both have the same layout and, byte for byte, the same contents."""
    require(
        got.shape == expected.shape and got.dtype == expected.dtype,
        f"{what}: {got.dtype} {tuple(got.shape)} instead of "
        f"{expected.dtype} {tuple(expected.shape)}",
    )
    wrong = (bytes_of(got) != bytes_of(expected)).nonzero()
    if len(wrong):
        raise CheckFailed(
            f"{what}: {len(wrong)} of {bytes_of(got).numel()} bytes differ, the first at byte "
            f"{int(wrong[0])}"
        )


@contextmanager
def refuses(error: type[BaseException], what: str) -> Iterator[None]:
    """Fail unless the block raises `error`."""
    try:
        yield
    except error:
        return
    raise CheckFailed(f"{what}: {error.__name__} was not raised")
