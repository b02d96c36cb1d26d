"""The states of a write task, as a table (W1).

    PENDING ──► QUEUED ──► COPYING ──► HOST_READY ──► WRITTEN
       │           │          │            │
       └───────────┴──────────┴────────────┴────────► FAILED

PENDING     made by a save, not yet in the log
QUEUED      in the log
COPYING     the committer has claimed it and waits for its device→host copy
HOST_READY  its rows lie in host memory
WRITTEN     its rows lie in the pool
FAILED      its rows never will

No threads, clocks or tensors here.
"""

from __future__ import annotations

from enum import Enum

from slotmirror.core.errors import IllegalTransitionError
from slotmirror.core.runtime import Lock


class TaskState(Enum):
    """Where a write task stands."""

    PENDING = "pending"
    QUEUED = "queued"
    COPYING = "copying"
    HOST_READY = "host_ready"
    WRITTEN = "written"
    FAILED = "failed"


TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset({TaskState.QUEUED, TaskState.FAILED}),
    TaskState.QUEUED: frozenset({TaskState.COPYING, TaskState.FAILED}),
    TaskState.COPYING: frozenset({TaskState.HOST_READY, TaskState.FAILED}),
    TaskState.HOST_READY: frozenset({TaskState.WRITTEN, TaskState.FAILED}),
    TaskState.WRITTEN: frozenset(),
    TaskState.FAILED: frozenset(),
}

TERMINAL = frozenset(state for state, targets in TRANSITIONS.items() if not targets)


class TaskProgress:
    """One task's state, moved along the table and nowhere else.

    `advance` takes the task lock, so that of two threads that claim `COPYING` exactly one
    succeeds (T6); the lock is held for the move alone (T5).

    state  the present one; may be out of date as soon as it is read
    """

    __slots__ = ("_lock", "_name", "state")

    def __init__(self, name: str, lock: Lock) -> None:
        self._name = name
        self._lock = lock
        self.state = TaskState.PENDING

    def advance(self, target: TaskState) -> None:
        """Move to `target`; raises `IllegalTransitionError` and changes nothing otherwise."""
        with self._lock:
            if target not in TRANSITIONS[self.state]:
                move = f"{self.state.name} to {target.name}"
                raise IllegalTransitionError(f"{self._name}: no move from {move}")
            self.state = target

    def fail(self) -> None:
        """Move to `FAILED` unless the state is terminal already."""
        with self._lock:
            if self.state not in TERMINAL:
                self.state = TaskState.FAILED
