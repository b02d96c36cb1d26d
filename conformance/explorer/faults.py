"""Seeded faults of a run, and what may follow from them.

One fault per run: something of the device fails, a thread dies, or time runs out. The judge then
holds every error against it: it must name the fault as its cause, a failure of the cache must
stay, and whatever is no consequence of the fault ends the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slotmirror.conformance.explorer.scheduler import ScheduleError, Scheduler
from slotmirror.conformance.simulated import FaultKind, SimulatedBackend
from slotmirror.core.errors import (
    CacheFailedError,
    GatherFailedError,
    WaitTimeoutError,
    without_tracebacks,
)
from slotmirror.core.manager import PrefixCacheManager

COMMITTER = "slotmirror-committer"


class ActorKilled(BaseException):
    """Ends a thread wherever it is, as an interpreter that goes down would."""


class ActorInterrupted(KeyboardInterrupt):
    """The same by the way that even a mover lets pass."""


class Trouble(Enum):
    """What goes wrong in a run, beside the kinds of `FaultKind`."""

    COMMITTER_DEATH = "an exception that is no Exception ends the mover's operation"
    BUILDER_DEATH = "a builder dies inside a call"
    STALL = "the device stands still for a long time"
    TIME_OUT = "the clock runs ahead: waits end although somebody could run"


# How late a fault may come; most runs have about so many occurrences.
_LATEST = {
    FaultKind.ALLOCATION: 25,
    FaultKind.SNAPSHOT: 8,
    FaultKind.COPY_LAUNCH: 15,
    FaultKind.DEVICE_COPY: 12,
    FaultKind.COPY_RUN: 30,
    FaultKind.EVENT_RECORD: 15,
    FaultKind.EVENT_WAIT: 30,
    FaultKind.POOL_WRITE: 25,
    FaultKind.POOL_READ: 12,
    FaultKind.BIND: 6,
    FaultKind.DEVICE_LOST: 120,
}
_STALL_S_MAX = 700.0


@dataclass(frozen=True, slots=True)
class FaultPlanned:
    """One fault: its kind, and at which occurrence it comes."""

    kind: FaultKind | Trouble
    number: int

    @property
    def name(self) -> str:
        """For counts."""
        return self.kind.name.lower()

    @property
    def loses_device(self) -> bool:
        """Whether nothing works any more afterwards."""
        return self.kind in (FaultKind.DEVICE_LOST, FaultKind.EVENT_WAIT)


def draw_fault(rng: random.Random) -> FaultPlanned:
    """One fault of any kind."""
    kind = rng.choice([*FaultKind, *Trouble])
    latest = _LATEST.get(kind, 40) if isinstance(kind, FaultKind) else 40
    return FaultPlanned(kind, rng.randrange(1, latest + 1))


class Reaction(Enum):
    """What the actor does that met an error."""

    RETRY = "the call is made again"
    STOP = "the actor makes no more calls"
    DISCARD = "the step cannot be delivered and is discarded"


class Judge(Protocol):
    """Says what an actor does about an error of a call."""

    def judge(self, error: BaseException) -> Reaction:
        """Raises if the call had to succeed."""
        ...


class NoFaults:
    """The judge of runs in which nothing fails."""

    def judge(self, error: BaseException) -> Reaction:
        raise ScheduleError(f"a legal call met {type(error).__name__}: {error}") from error


class FaultJudge:
    """Brings one run's fault about, and judges the errors that come of it."""

    def __init__(
        self, planned: FaultPlanned | None, backend: SimulatedBackend, scheduler: Scheduler
    ) -> None:
        self.planned = planned
        self._backend = backend
        self._scheduler = scheduler
        self._calls_left = planned.number if planned else 0
        self._retries_left = 200
        self.failure: CacheFailedError | None = None
        """The sticky failure, once somebody met it."""
        self.happened = False
        self.replace_builder: Callable[[], None] = lambda: None
        """Starts another builder in the place of one that died."""
        self._arm()

    def _arm(self) -> None:
        if self.planned is None:
            return
        kind, number = self.planned.kind, self.planned.number
        if isinstance(kind, FaultKind):
            self._backend.faults.arm(kind, number)
        elif kind is Trouble.STALL:
            self._scheduler.stall_after(number * 10, _STALL_S_MAX * number / 40)

    def before_call(self, actor: str) -> None:
        """An actor enters the backend; it may be its last deed."""
        if self.planned is None or not isinstance(self.planned.kind, Trouble):
            return
        kind = self.planned.kind
        hit = (kind is Trouble.COMMITTER_DEATH and actor == COMMITTER) or (
            kind is Trouble.BUILDER_DEATH and actor.startswith("builder")
        )
        if hit:
            self._calls_left -= 1
            if self._calls_left == 0:
                text = f"injected fault: {actor} is killed"
                self._backend.faults.raised.append(text)
                self.happened = True
                interrupts = actor == COMMITTER and self.planned.number % 2
                raise (ActorInterrupted if interrupts else ActorKilled)(text)

    # -- judging ----------------------------------------------------------------------------

    def judge(self, error: BaseException) -> Reaction:
        """What to do about an error of a call; raises it if the fault does not explain it."""
        if self.planned is None:
            return NoFaults().judge(error)
        if isinstance(error, WaitTimeoutError):
            return self._judge_time_out(error)
        if not self._explains(error):
            raise ScheduleError(f"no fault explains {type(error).__name__}: {error}") from error
        self.happened = True
        if isinstance(error, CacheFailedError):
            self._judge_failure(error)
            return Reaction.STOP
        if isinstance(error, GatherFailedError):
            return Reaction.DISCARD
        return self._retry(error)

    def _judge_time_out(self, error: WaitTimeoutError) -> Reaction:
        """Waits end only where time runs out or somebody died; the report says who waits."""
        planned = self.planned
        if planned is None or not (isinstance(planned.kind, Trouble) or planned.loses_device):
            raise ScheduleError(f"a wait without reason: {error}") from error
        if "operations completed" not in str(error) and "unconsumed step ids" not in str(error):
            raise ScheduleError(f"a time-out that names nothing: {error}") from error
        if planned.kind is Trouble.BUILDER_DEATH:
            self.replace_builder()
            self.replace_builder = lambda: None
        self.happened = True
        return self._retry(error)

    def _retry(self, error: BaseException) -> Reaction:
        if self.planned is not None and self.planned.loses_device:
            return Reaction.STOP
        self._retries_left -= 1
        if self._retries_left < 0:
            raise ScheduleError(f"no end of {type(error).__name__}: {error}") from error
        return Reaction.RETRY

    def _judge_failure(self, error: CacheFailedError) -> None:
        if self.failure is not None and error.cause is not self.failure.cause:
            raise ScheduleError(
                f"the cache failed with {error.cause!r}, before with {self.failure.cause!r}"
            )
        if self.failure is None:
            # With its traceback it would keep the frames of the call, and their tensors, alive.
            without_tracebacks(error)
            self.failure = error

    def _explains(self, error: BaseException) -> bool:
        """Whether the error names the injected fault, in its text or in its chain of causes."""
        raised = self._backend.faults.raised
        seen: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and not any(link is known for known in seen):
            if any(text in str(link) for text in raised):
                return True
            seen.append(link)
            link = link.__cause__ or link.__context__
        return False

    def check_sticky(self, cache: PrefixCacheManager) -> None:
        """Every entry raises the first cause, once the cache has failed (W5)."""
        if self.failure is None:
            return
        entries: list[Callable[[], object]] = [
            lambda: cache.materialize(1),
            lambda: cache.discard_step(1),
            lambda: cache.save_outputs(None, {}, num_tokens_unpadded=1),
            lambda: cache.quiesce(1.0),
            lambda: cache.preallocate(()),
            cache.reset,
        ]
        for entry in entries:
            try:
                entry()
            except CacheFailedError as error:
                self._judge_failure(error)
            else:
                raise ScheduleError("a failed cache serves as if nothing had happened")
