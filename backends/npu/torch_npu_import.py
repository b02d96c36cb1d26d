"""Importing torch_npu without breaking the process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slotmirror.core.errors import BackendUnavailable

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether `import torch` imports installed device packages; "0" is no."""


def import_torch_npu() -> Any:
    """The module. Raises `BackendUnavailable` with whatever its import threw."""
    try:
        with _autoload_off():
            return importlib.import_module("torch_npu")
    except KeyboardInterrupt:
        raise
    # Without CANN this is an ImportError of a shared library; other releases exit or assert.
    except BaseException as error:
        raise BackendUnavailable(
            "npu", f"torch_npu cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _autoload_off() -> Iterator[None]:
    """Set the variable to 0 for torch_npu's own import of torch; then as it was, also if unset.

    torch_npu changes it while it is imported and leaves it changed when that fails.
    """
    former = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(AUTOLOAD, None)
        else:
            os.environ[AUTOLOAD] = former
