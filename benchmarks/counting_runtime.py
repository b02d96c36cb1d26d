"""A runtime that counts what one thread waits for: conditions, and locks that another holds."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from slotmirror.core.runtime import Lock, ThreadRuntime


class WaitCounts:
    """Waits of the thread that made this object, while `watching`."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.watching = False
        self.condition_waits = 0
        self.lock_waits = 0
        self.lock_wait_s_max = 0.0

    @property
    def concerned(self) -> bool:
        """Whether a wait of the calling thread counts now."""
        return self.watching and threading.get_ident() == self._thread


class CountingLock:
    """A lock that counts how often it was taken by somebody else when it was wanted."""

    def __init__(self, counts: WaitCounts) -> None:
        self._lock = threading.Lock()
        self._counts = counts

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        if self._lock.acquire(False):
            return True
        if not blocking:
            return False
        started = time.perf_counter()
        taken = self._lock.acquire(True, timeout)
        counts = self._counts
        if counts.concerned:
            counts.lock_waits += 1
            counts.lock_wait_s_max = max(counts.lock_wait_s_max, time.perf_counter() - started)
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class CountingCondition(threading.Condition):
    """A condition that counts waits."""

    def __init__(self, lock: Lock, counts: WaitCounts) -> None:
        super().__init__(lock)  # type: ignore[arg-type]
        self._counts = counts

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`."""
        if self._counts.concerned:
            self._counts.condition_waits += 1
        return super().wait(timeout)


class CountingRuntime(ThreadRuntime):
    """The operating system's threads and clock; `counts` are those of the thread that made it."""

    def __init__(self) -> None:
        self.counts = WaitCounts()

    def lock(self, name: str) -> Lock:
        return CountingLock(self.counts)

    def condition(self, lock: Lock) -> threading.Condition:
        return CountingCondition(lock, self.counts)
