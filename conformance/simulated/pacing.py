"""Who steps the device's queues, and when.

The device itself never moves. A `Pacing` is told of every call and every wait: on real threads
`SelfPaced` lets whoever asks move the queues a little, in an order that comes from its seed; the
schedule explorer puts its own in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

_POLL_S = 0.001


class Pacing(Protocol):
    """Decides when queues move."""

    def call(self, member: str) -> None:
        """The calling thread is about to use this member of the backend."""
        ...

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Hold the calling thread until `reached()`; False after `timeout_s` seconds."""
        ...


class SelfPaced:
    """Queues are moved by whoever waits or looks, one piece of work at a time. Real threads.

    `advance` runs one piece of work if there is one that can run.
    """

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._lock = threading.Lock()

    def call(self, member: str) -> None:
        """Asking for a fence lets the device do one piece of work, so that polling ends."""
        if member == "done":
            self._step()

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not reached():
            if not self._step():
                left = deadline - time.monotonic()
                if left <= 0:
                    return reached()
                time.sleep(min(_POLL_S, left))
        return True

    def _step(self) -> bool:
        with self._lock:
            return self._advance()
