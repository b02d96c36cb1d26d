"""W1, T6: the task state machine is a table."""

from __future__ import annotations

import itertools
import threading

import pytest

from slotmirror.core.errors import IllegalTransitionError
from slotmirror.core.write_task import TERMINAL, TRANSITIONS, TaskProgress, TaskState

CHAIN = [
    TaskState.PENDING,
    TaskState.QUEUED,
    TaskState.COPYING,
    TaskState.HOST_READY,
    TaskState.WRITTEN,
]


def reached(state: TaskState) -> TaskProgress:
    """A task that stands in `state`."""
    task = TaskProgress("task", threading.Lock())
    for step in CHAIN[1 : CHAIN.index(state) + 1] if state in CHAIN else [state]:
        task.advance(step)
    return task


def test_W1_the_table_is_the_chain_and_failed_from_what_is_not_terminal() -> None:
    """PENDING → QUEUED → COPYING → HOST_READY → WRITTEN, FAILED from all but the last."""
    for state, successor in itertools.pairwise(CHAIN):
        assert TRANSITIONS[state] == {successor, TaskState.FAILED}
    assert {TaskState.WRITTEN, TaskState.FAILED} == TERMINAL


@pytest.mark.parametrize(("state", "target"), list(itertools.product(TaskState, TaskState)))
def test_W1_any_other_move_raises_and_changes_nothing(state: TaskState, target: TaskState) -> None:
    """All 36 pairs: legal moves move, the rest raise naming both states."""
    task = reached(state)
    if target in TRANSITIONS[state]:
        task.advance(target)
        assert task.state is target
    else:
        with pytest.raises(IllegalTransitionError, match=f"{state.name} to {target.name}"):
            task.advance(target)
        assert task.state is state


@pytest.mark.parametrize("state", TaskState)
def test_W1_fail_moves_live_tasks_and_leaves_terminal_ones(state: TaskState) -> None:
    """`fail` may be called on every path; terminal states never change."""
    task = reached(state)
    task.fail()
    assert task.state is (state if state in TERMINAL else TaskState.FAILED)


def test_T6_exactly_one_claims_copying() -> None:
    """The second claim raises, whoever makes it."""
    task = reached(TaskState.QUEUED)
    task.advance(TaskState.COPYING)
    with pytest.raises(IllegalTransitionError):
        task.advance(TaskState.COPYING)
