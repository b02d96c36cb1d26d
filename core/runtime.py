"""Threads, locks and clocks, behind one small interface.

Everything in `core/` that blocks, takes a lock or starts a thread does it through a `Runtime`, so
that a test can put a seeded scheduler in the place of the operating system's and step every
thread by hand. `committer.py` is the only other module that knows there are threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Lock(AbstractContextManager[object], Protocol):
    """Mutual exclusion; not re-entrant."""


class Condition(AbstractContextManager[object], Protocol):
    """A condition over a lock of the same runtime; entering it takes that lock."""

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, take the lock again. Caller holds it."""

    def notify_all(self) -> None:
        """Wake every waiter. Caller holds the lock."""


class Thread(Protocol):
    """A started thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Whether it still runs."""


class Runtime(Protocol):
    """Where locks, conditions, threads and the time come from."""

    def lock(self, name: str) -> Lock:
        """A new lock; `name` says in reports which of the three kinds it is (T4)."""

    def condition(self, lock: Lock) -> Condition:
        """A new condition over `lock`, which this runtime made."""

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        """Start a daemon thread that runs `target`."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""


class ThreadRuntime:
    """The operating system's threads and clock."""

    def lock(self, name: str) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock) -> Condition:
        if not isinstance(lock, type(threading.Lock())):
            raise TypeError(f"{lock!r} was not made by this runtime")
        return threading.Condition(lock)

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    monotonic = staticmethod(time.monotonic)
