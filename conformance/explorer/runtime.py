"""The core's runtime, and the device's pacing, under the scheduler.

Locks know who holds them: taking one twice, out of order, holding one across a wait or across a
backend call ends the run (T4, T5, P2).
"""

from __future__ import annotations

from collections.abc import Callable

from slotmirror.conformance.explorer.scheduler import Actor, ScheduleError, Scheduler
from slotmirror.core.runtime import Condition, Lock, Thread

_ORDER = {"manager": 0, "log": 1, "task": 2}
_INNERMOST = 3


class ExploredLock:
    """A lock that switches actors before it is taken."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._scheduler = scheduler
        self.name = name
        self.owner: Actor | None = None

    def __enter__(self) -> ExploredLock:
        scheduler = self._scheduler
        self._check_order()
        scheduler.point()
        if self.owner is not None:
            scheduler.block(_ForLock(self))
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.give()

    def _check_order(self) -> None:
        me = self._scheduler.current
        if me is not None and me.held:
            inner = _ORDER.get(self.name, _INNERMOST)
            if any(_ORDER.get(held, _INNERMOST) >= inner for held in me.held):
                self._scheduler.fail(
                    ScheduleError(f"{me.name} takes the {self.name} lock inside {me.held}")
                )

    def take(self) -> None:
        """Become the owner of a lock that is free."""
        me = self._scheduler.current
        assert me is not None
        self.owner = me
        me.held.append(self.name)

    def give(self) -> None:
        """Stop being the owner; harmless while a failed run is unwound."""
        if self.owner is not None:
            self.owner.held.remove(self.name)
            self.owner = None


class ExploredCondition:
    """A condition over one of these locks; no wake-up is ever lost or spurious."""

    def __init__(self, scheduler: Scheduler, lock: ExploredLock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[_ForNotice] = []

    def __enter__(self) -> ExploredLock:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler, lock = self._scheduler, self._lock
        me = scheduler.current
        assert me is not None
        if lock.owner is not me or len(me.held) != 1:
            scheduler.fail(
                ScheduleError(f"{me.name} waits on a {lock.name} condition holding {me.held}")
            )
        deadline_s = None if timeout is None else scheduler.now_s + timeout
        waiting = _ForNotice(lock, deadline_s)
        self._waiting.append(waiting)
        lock.give()
        scheduler.block(waiting)
        if not waiting.noticed:
            self._waiting.remove(waiting)
        lock.take()
        return waiting.noticed

    def notify_all(self) -> None:
        if self._lock.owner is not self._scheduler.current:
            self._scheduler.fail(ScheduleError("a notification without the lock"))
        for waiting in self._waiting:
            waiting.noticed = True
        self._waiting.clear()
        self._scheduler.point()


class ExploredThread:
    """A thread that the core started."""

    def __init__(self, scheduler: Scheduler, actor: Actor) -> None:
        self._scheduler = scheduler
        self._actor = actor

    def join(self, timeout: float | None = None) -> None:
        check_no_lock(self._scheduler, "join")
        if not self._actor.done:
            deadline_s = None if timeout is None else self._scheduler.now_s + timeout
            self._scheduler.block(_Until(lambda: self._actor.done, deadline_s, "a thread to end"))

    def is_alive(self) -> bool:
        return not self._actor.done


class ExploredRuntime:
    """Given to a manager in the place of `ThreadRuntime`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def lock(self, name: str) -> Lock:
        return ExploredLock(self._scheduler, name)

    def condition(self, lock: Lock) -> Condition:
        assert isinstance(lock, ExploredLock)
        return ExploredCondition(self._scheduler, lock)

    def start_thread(self, name: str, target: Callable[[], None]) -> Thread:
        check_no_lock(self._scheduler, "start_thread")
        actor = self._scheduler.spawn(name, target)
        self._scheduler.point()
        return ExploredThread(self._scheduler, actor)

    def monotonic(self) -> float:
        return self._scheduler.now_s


class ExploredPacing:
    """Given to the simulated device: its queues move when the scheduler picks them.

    `before_call(actor)` is told who enters the device; it may raise.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.before_call: Callable[[str], None] = lambda _: None

    def call(self, member: str) -> None:
        check_no_lock(self._scheduler, member)
        self._scheduler.point()
        if self._scheduler.current is not None:
            self.before_call(self._scheduler.current.name)

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        self._scheduler.block(
            _Until(reached, self._scheduler.now_s + timeout_s, "a fence of the device")
        )
        return reached()


def check_no_lock(scheduler: Scheduler, what: str) -> None:
    """End the run if the calling actor holds a lock (T5, P2)."""
    me = scheduler.current
    if me is not None and me.held:
        scheduler.fail(ScheduleError(f"{me.name} calls {what} holding {me.held}"))


class _ForLock:
    deadline_s = None

    def __init__(self, lock: ExploredLock) -> None:
        self._lock = lock

    def over(self, now_s: float) -> bool:
        return self._lock.owner is None

    def __repr__(self) -> str:
        return f"the {self._lock.name} lock of {self._lock.owner and self._lock.owner.name}"


class _ForNotice:
    def __init__(self, lock: ExploredLock, deadline_s: float | None) -> None:
        self._lock = lock
        self.deadline_s = deadline_s
        self.noticed = False

    def over(self, now_s: float) -> bool:
        late = self.deadline_s is not None and now_s >= self.deadline_s
        return (self.noticed or late) and self._lock.owner is None

    def __repr__(self) -> str:
        until = "" if self.deadline_s is None else f" until {self.deadline_s:g} s"
        return f"a notice under the {self._lock.name} lock{until}"


class _Until:
    def __init__(self, ready: Callable[[], bool], deadline_s: float | None, what: str) -> None:
        self._ready = ready
        self.deadline_s = deadline_s
        self._what = what

    def over(self, now_s: float) -> bool:
        return self._ready() or (self.deadline_s is not None and now_s >= self.deadline_s)

    def __repr__(self) -> str:
        until = "" if self.deadline_s is None else f" until {self.deadline_s:g} s"
        return f"{self._what}{until}"
