"""A runtime in which nothing happens by itself: the test takes every step of every thread.

Everything runs on the test's own thread. The committer's thread is never started: the test calls
its `step`. A wait lets the `actors` take steps instead, and moves the virtual clock to the wait's
end once none of them can. Locks know who holds them, so that a backend can refuse to be called
under one (T5, P2).
"""

from __future__ import annotations

from collections.abc import Callable

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.runtime import Condition, Lock, Thread


class DrivenLock:
    """A lock of one thread: taking it twice is the deadlock that it would be."""

    def __init__(self, runtime: DrivenRuntime, name: str) -> None:
        self._runtime = runtime
        self.name = name

    def __enter__(self) -> DrivenLock:
        if self.name != "task" and self.name in self._runtime.held:
            raise AssertionError(f"the {self.name} lock is taken twice: {self._runtime.held}")
        order = ["manager", "log", "task", "helpers"]
        if self._runtime.held and order.index(self._runtime.held[-1]) > order.index(self.name):
            raise AssertionError(f"{self.name} taken inside {self._runtime.held}")
        self._runtime.held.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.held.remove(self.name)


class DrivenCondition:
    """Waiting lets the runtime's actors act."""

    def __init__(self, runtime: DrivenRuntime, lock: DrivenLock) -> None:
        self._runtime = runtime
        self._lock = lock
        self._notifications = 0

    def __enter__(self) -> DrivenLock:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        if self._runtime.held != [self._lock.name]:
            raise AssertionError(f"a wait under {self._runtime.held}")
        self._lock.__exit__()
        before = self._notifications
        try:
            # Whoever makes progress without a notification leaves the waiter asleep.
            while self._notifications == before:
                if not self._runtime.let_others_act(timeout):
                    return False
            return True
        finally:
            self._lock.__enter__()

    def notify_all(self) -> None:
        if self._lock.name not in self._runtime.held:
            raise AssertionError("notified without the lock")
        self._notifications += 1


class UnstartedThread:
    """Stands for a thread whose work the test does by hand."""

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


class DrivenRuntime:
    """Injected into a manager; see the module's text."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.held: list[str] = []
        self.started: list[str] = []
        self.actors: list[Callable[[], bool]] = []

    def lock(self, name: str) -> Lock:
        return DrivenLock(self, name)

    def condition(self, lock: Lock) -> Condition:
        assert isinstance(lock, DrivenLock)
        return DrivenCondition(self, lock)

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        self.started.append(name)
        return UnstartedThread()

    def monotonic(self) -> float:
        return self.now_s

    def let_others_act(self, timeout_s: float | None) -> bool:
        """One step of the first actor that can take one; else the clock moves on."""
        if any(actor() for actor in self.actors):
            return True
        if timeout_s is None:
            raise AssertionError("a wait without a bound, and nobody left to end it")
        self.now_s += timeout_s
        return False


_CHECKED = ("bind_thread", "current_stream", "new_stream", "new_fence", "alloc_host", "snapshot",
            "copy_to_host", "gather_slots", "scatter_slots")  # fmt: skip


class LockCheckedBackend(CpuRefBackend):
    """cpu_ref that refuses to be called while a lock of the runtime is held (T5, P2)."""

    def __init__(self, runtime: DrivenRuntime) -> None:
        super().__init__()
        self.runtime = runtime
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in _CHECKED:
            runtime = super().__getattribute__("runtime")
            if runtime.held:
                raise AssertionError(f"backend.{name} called under {runtime.held}")
            super().__getattribute__("calls").append(name)
        return super().__getattribute__(name)
