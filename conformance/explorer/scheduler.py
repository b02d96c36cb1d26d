"""The baton: real threads of which exactly one runs, and a scheduler that hands it on.

Code under test blocks inside functions, so every actor has a thread of its own; it sleeps on its
own lock until the baton is handed to it. Device queues are no threads: whoever holds the baton
runs their next piece of work when they are picked. The clock is virtual and moves only when
nobody can run; if it cannot move either, the run is a deadlock, reported with who waits for what.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from slotmirror.conformance.explorer.choices import Choices
from slotmirror.conformance.explorer.threads import run_in_thread

_UNWIND_S = 10.0


class RunOver(BaseException):
    """Unwinds the actors of a run that has failed; no code under test may swallow it."""


class ScheduleError(AssertionError):
    """The run showed a defect: a broken rule, a deadlock, or no end."""


class Waiting(Protocol):
    """What a blocked actor waits for."""

    def over(self, now_s: float) -> bool:
        """Whether the actor can go on."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """When it goes on anyway."""
        ...


class Step(Protocol):
    """Something without a thread that can be picked: a queue of the device."""

    name: str
    """For the choices and reports."""


class Actor:
    """One thread under the scheduler."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self.name = name
        self.target = target
        self.baton = _locked()
        self.ended = _locked()
        self.waiting: Waiting | None = None
        self.held: list[str] = []
        """Kinds of the locks that it holds, in the order of taking them."""
        self.done = False

    def __repr__(self) -> str:
        state = "ended" if self.done else f"waits for {self.waiting}" if self.waiting else "can run"
        return f"{self.name} {state}" + (f", holds {self.held}" if self.held else "")


def _locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Scheduler:
    """One run. `steps` says which device queues can move, `step` moves one."""

    def __init__(self, choices: Choices, points_max: int = 100_000) -> None:
        self._choices = choices
        self._points_max = points_max
        self._actors: list[Actor] = []
        self._main = _locked()
        self.steps: Callable[[], Sequence[Step]] = list
        self.step: Callable[[Step], None] = lambda _: None
        self.current: Actor | None = None
        self.now_s = 0.0
        self.points = 0
        self.switches = 0
        self.failure: BaseException | None = None
        self.deaths: tuple[type[BaseException], ...] = ()
        """What an actor may die of without failing the run."""
        self._stall: tuple[int, float] | None = None
        self._stalled_until_s = 0.0

    # -- the run ----------------------------------------------------------------------------

    def spawn(self, name: str, target: Callable[[], None]) -> Actor:
        """A new actor; it runs when it is picked."""
        actor = Actor(name, target)
        self._actors.append(actor)
        run_in_thread(lambda: self._live(actor))
        return actor

    def run(self) -> None:
        """Run all actors to their end; raises the first failure. Called by the test's thread."""
        first = self._actors[0]
        self.current = first
        first.baton.release()
        self._main.acquire()
        self._unwind()
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: BaseException) -> None:
        """Record the run's failure, the first one counts, and unwind the calling actor."""
        self.failure = self.failure or failure
        raise RunOver

    def _live(self, actor: Actor) -> None:
        actor.baton.acquire()
        try:
            if self.failure is None:
                actor.target()
        except RunOver:
            pass
        except BaseException as error:
            if not isinstance(error, self.deaths):
                self.failure = self.failure or error
        actor.done = True
        actor.ended.release()
        try:
            self._go_on_without(actor)
        except RunOver:
            self._let_main_go_on()

    def _go_on_without(self, actor: Actor) -> None:
        """Hand the baton on from an actor that has ended."""
        if self.failure is None:
            self._actors.remove(actor)
            if self._actors:
                self.current = self._next(None)
                self.current.baton.release()
                return
        self._let_main_go_on()

    def _let_main_go_on(self) -> None:
        if self._main.locked():
            self._main.release()

    def _unwind(self) -> None:
        """End what a failed run has left, one actor after the other."""
        for actor in list(self._actors):
            if not actor.done:
                self.current = actor
                actor.baton.release()
            if not actor.ended.acquire(timeout=_UNWIND_S):
                raise ScheduleError(f"{actor} does not end") from self.failure

    # -- schedule points, called by the actor that runs ---------------------------------------

    def point(self) -> None:
        """Whoever is picked goes on; perhaps the caller."""
        if self.failure is not None:
            raise RunOver
        if self._choices.stays():
            return
        me = self._me()
        self._hand_over(me, self._next(me))

    def block(self, waiting: Waiting) -> None:
        """Let others run until `waiting` is over."""
        if self.failure is not None:
            raise RunOver
        me = self._me()
        me.waiting = waiting
        self._hand_over(me, self._next(me))
        me.waiting = None

    def _me(self) -> Actor:
        if self.current is None:
            raise RuntimeError("a schedule point outside every actor")
        return self.current

    def _hand_over(self, me: Actor, following: Actor) -> None:
        if following is me:
            return
        self.switches += 1
        self.current = following
        following.baton.release()
        me.baton.acquire()
        if self.failure is not None:
            raise RunOver

    def _next(self, me: Actor | None) -> Actor:
        """Pick who goes on, running the device's work as long as that is picked."""
        choices = self._choices
        while True:
            self.points += 1
            if self.points > self._points_max:
                self.fail(ScheduleError(f"no end after {self.points} points:\n{self.report()}"))
            if choices.time_passes():
                self._move_clock()
            now_s = self.now_s
            able: list[Actor] = []
            for actor in self._actors:
                if actor.waiting is None or actor.waiting.over(now_s):
                    # The one that runs comes first, for choices that prefer to stay with it.
                    able.insert(0 if actor is me else len(able), actor)
            steps = self.steps() if self._device_moves() else ()
            if not able and not steps:
                if not self._move_clock():
                    self.fail(ScheduleError(f"deadlock:\n{self.report()}"))
                continue
            index = choices.pick([*able, *steps], bool(able) and able[0] is me)
            if index < len(able):
                return able[index]
            self.step(steps[index - len(able)])

    def _move_clock(self) -> bool:
        """To the next deadline; False if nobody has one."""
        deadlines = [
            a.waiting.deadline_s
            for a in self._actors
            if a.waiting is not None and a.waiting.deadline_s is not None
        ]
        if self.now_s < self._stalled_until_s:
            deadlines.append(self._stalled_until_s)
        if not deadlines:
            return False
        self.now_s = max(self.now_s, min(deadlines))
        return True

    def stall_after(self, points: int, seconds: float) -> None:
        """Let the device stand still for some virtual time, from a point of the run on."""
        self._stall = (points, seconds)

    def _device_moves(self) -> bool:
        if self._stall is not None and self.points >= self._stall[0]:
            self._stalled_until_s = self.now_s + self._stall[1]
            self._stall = None
        return self.now_s >= self._stalled_until_s

    def report(self) -> str:
        """Who waits for what."""
        lines = [f"  {actor!r}" for actor in self._actors]
        return "\n".join([*lines, f"  clock {self.now_s:g} s, {self.points} points"])
