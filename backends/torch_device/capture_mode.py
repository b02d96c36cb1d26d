"""Calls that may run while another thread captures a graph.

While a thread captures in the global mode, an event query or a page-locked allocation in any other
thread breaks its capture, unless that other thread has relaxed its own capture mode (backends
spec, sections 1 and 3). torch offers no call for it, the drivers do; the mode belongs to the
calling thread, so it is relaxed around single calls and nothing of the engine's is changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

RelaxedCapture: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes a context in which the calling thread disturbs no capture elsewhere."""

Exchange: TypeAlias = Callable[[object], int]
"""The driver's call: takes a pointer to a mode, leaves the former one there; 0 is success."""

_RELAXED = 2
"""The relaxed mode has this value in the CUDA, HIP and ACL headers alike."""


def relaxed_capture(library: str, symbol: str) -> RelaxedCapture:
    """The context for a driver `library` that exports `symbol`; does nothing where it is missing.

    A driver without the call cannot capture graphs in such a mode either.
    """
    try:
        # The call is a few instructions: with CDLL the release of the GIL would cost more.
        exchange: Exchange = getattr(ctypes.PyDLL(library), symbol)
    except (OSError, AttributeError):
        return nullcontext
    return lambda: relaxed_by(exchange)


@contextmanager
def relaxed_by(exchange: Exchange) -> Iterator[None]:
    """Relax the calling thread's mode and put the former one back, errors included."""
    mode = ctypes.c_int(_RELAXED)
    # It fails before the driver is initialised: then nothing is captured, nothing to put back.
    relaxed = exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if relaxed:
            exchange(ctypes.byref(mode))
