"""Faults on demand: the n-th occurrence of a kind of work fails, once or from then on.

A fault is an ordinary exception that says which one it is, so that a test can follow the cause
from the device to the last caller.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum


class FaultKind(Enum):
    """What can be made to fail; the value says where the error appears."""

    ALLOCATION = "alloc_host raises MemoryError"
    SNAPSHOT = "snapshot raises, nothing is queued"
    COPY_LAUNCH = "copy_to_host raises after part of the copies were queued"
    DEVICE_COPY = "copy_to_device raises, nothing is queued"
    COPY_RUN = "a queued copy fails when it runs; fences behind it report it"
    EVENT_RECORD = "recording a fence raises"
    EVENT_WAIT = "asking or waiting for a fence finds the device lost"
    POOL_WRITE = "scatter_slots raises"
    POOL_READ = "gather_slots raises"
    BIND = "bind_thread raises"
    DEVICE_LOST = "a queued piece of work ends the device: all that follows raises"


class InjectedFault(RuntimeError):
    """A fault that was asked for; its text says which."""


class InjectedMemoryError(InjectedFault, MemoryError):
    """An allocation that was made to fail."""


def again(error: BaseException) -> BaseException:
    """The same error, new: raised twice, one object would keep the frames of both calls alive."""
    return type(error)(*error.args)


class FaultPlan:
    """Which occurrences fail. Occurrences of a kind are counted from its first `arm` on."""

    def __init__(self) -> None:
        self.raised: list[str] = []
        """What the faults that happened say, in order. Not the errors: kept, they would keep the
        frames that they passed, and the memory of those, alive."""
        self._seen: Counter[FaultKind] = Counter()
        self._due: dict[FaultKind, dict[int, BaseException | None]] = {}

    def arm(self, kind: FaultKind, number: int, error: BaseException | None = None) -> None:
        """Let occurrence `number` of `kind`, from 1, raise `error`, an `InjectedFault` if None."""
        self._due.setdefault(kind, {})[number] = error

    def meet(self, kind: FaultKind) -> BaseException | None:
        """Count one occurrence; the error it is to fail with, if it is."""
        if not self._due:
            return None
        due = self._due.get(kind)
        if due is None:
            return None
        self._seen[kind] += 1
        number = self._seen[kind]
        if number not in due:
            return None
        error = due.pop(number) or _default_error(kind, number)
        self.raised.append(str(error))
        return error

    def raise_if_due(self, kind: FaultKind) -> None:
        """Count one occurrence and raise its error, if it has one."""
        error = self.meet(kind)
        if error is not None:
            raise error


def _default_error(kind: FaultKind, number: int) -> InjectedFault:
    text = f"injected fault: {kind.name.lower()} number {number}"
    return InjectedMemoryError(text) if kind is FaultKind.ALLOCATION else InjectedFault(text)
