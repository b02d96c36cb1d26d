"""H and C: hits against writes of the same and of later steps; claims."""

from __future__ import annotations

import pytest

from slotmirror.core.errors import MissingRowsError, StepStateError
from support.caches import Driver, firsts, rows


@pytest.mark.parametrize("prefetch", [True, False])
def test_H1_a_hit_on_blocks_computed_in_the_same_step(prefetch: bool) -> None:
    """B hits what A computes in this very step, and gets A's new rows."""
    driver = Driver(prefetch=prefetch)
    driver.start({"b": (4, 1), "a": (0, 5)}, new={"b": (4, (0, 2)), "a": (0, (0, 1))})
    out = driver.cache.materialize(driver.save(rows(0, 6), req_ids=["a", "b"]))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 5]
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3, 4]
    assert driver.cache.stats()["own_step_hit_tokens"] == 4


@pytest.mark.parametrize("prefetch", [True, False])
def test_H2_the_same_when_the_blocks_still_held_a_former_owners_rows(prefetch: bool) -> None:
    """The former owner's rows never reach B."""
    driver = Driver(prefetch=prefetch)
    driver.run({"old": (0, 4)}, rows(90, 4), new={"old": (0, (0,))})
    driver.start({"a": (0, 4), "b": (4, 1)}, new={"a": (0, (0,)), "b": (4, (0, 1))}, ended=["old"])
    out = driver.cache.materialize(driver.save(rows(0, 5)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4]
    assert driver.cache.stats()["own_step_hit_tokens"] == 4


def test_H2_a_hit_on_a_block_that_a_fills_up_in_this_step() -> None:
    """Two rows of the block are older than the step, two are its own."""
    driver = Driver()
    driver.run({"a": (0, 2)}, rows(0, 2), new={"a": (0, (0,))})
    driver.start({"a": (2, 2), "b": (4, 1)}, new={"b": (4, (0, 1))})
    out = driver.cache.materialize(driver.save(rows(2, 3)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("prefetch", [True, False])
def test_H3_a_planned_read_keeps_its_rows_however_late_it_is_fetched(prefetch: bool) -> None:
    """The block is handed on and rewritten twice before the hit is materialized."""
    driver = Driver(prefetch=prefetch)
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))}, ended=["a"])
    hit = driver.save(rows(4, 1))
    for number, start in enumerate((50, 60)):
        name = f"c{number}"
        driver.start({name: (0, 4)}, new={name: (0, (0,))}, ended=["b"] if not number else ["c0"])
        driver.save(rows(start, 4))
    driver.settle()
    out = driver.cache.materialize(hit)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4]


def test_H4_a_slot_written_twice_by_one_task_keeps_the_later_row() -> None:
    """Duplicate slots within one step: the last row stays."""
    driver = Driver()
    events = driver.tables.step(
        num_scheduled_tokens={"a": 4, "b": 4},
        num_computed_tokens={"a": 0, "b": 0},
        new=[_admitted("a", (0,)), _admitted("b", (0,))],
    )
    driver.cache.new_step_starts(events)
    driver.cache.materialize(driver.save(rows(0, 8)))
    out = driver.run({"c": (4, 1)}, rows(9, 1), new={"c": (4, (0, 1))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [4, 5, 6, 7, 9]


def _admitted(req_id: str, blocks: tuple[int, ...]) -> object:
    from slotmirror.core.events import AdmittedRequest

    return AdmittedRequest(req_id, 0, blocks)


def test_C1_the_order_is_ended_preempted_claim_hits() -> None:
    """One event: A ends, its id comes back, P is preempted and comes back, blocks move over."""
    driver = Driver()
    driver.run({"a": (0, 4), "p": (0, 4)}, rows(0, 8), new={"a": (0, (0,)), "p": (0, (1,))})
    out = driver.run(
        {"a": (4, 1), "p": (4, 1)},
        rows(20, 2),
        ended=["a"],
        preempted=["p"],
        new={"a": (4, (1, 2)), "p": (4, (0, 3))},
    )
    assert out.hidden_states is not None
    # A is a new owner and gets the whole hit; P was delivered its first 4 rows already.
    assert firsts(out.hidden_states["a"]) == [4, 5, 6, 7, 20]
    assert firsts(out.hidden_states["p"]) == [21]
    assert out.spans["p"] == (4, 5)


def test_C2_claimed_slots_are_absent_until_the_save() -> None:
    """Between start and save the slots have no row; after it they have the new one."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    present = driver.cache._tables.slots._present[:, 0]
    assert present.sum() == 4
    driver.start({"b": (0, 3)}, new={"b": (0, (0,))}, ended=["a"])
    assert present.sum() == 1
    driver.save(rows(10, 3))
    assert present.sum() == 4


def test_C3_a_step_that_was_never_saved_leaves_its_slots_absent() -> None:
    """The forward fails after the claim: a later hit raises, the former owner is not served."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    driver.start({"b": (0, 4)}, new={"b": (0, (0,))}, ended=["a"])
    driver.start({"c": (4, 1)}, new={"c": (4, (0, 1))}, ended=["b"])
    step_id = driver.save(rows(9, 1))
    with pytest.raises(MissingRowsError, match="'c'"):
        driver.cache.materialize(step_id)
    driver.cache.discard_step(step_id)
    assert driver.cache.stats()["steps_abandoned"] == 1


def test_C3_a_step_that_is_open_at_the_shutdown_is_abandoned() -> None:
    """Its save can never come; it is counted and nothing of it is held."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.cache.shutdown()
    assert driver.cache.stats()["steps_abandoned"] == 1
    assert driver.cache._tables.open_step is None


def test_C3_a_save_that_raised_may_be_repeated() -> None:
    """A failed save leaves the step open and everything else as it was."""
    driver = Driver()
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(ValueError, match="num_tokens_unpadded=3"):
        driver.save(rows(0, 3))
    out = driver.cache.materialize(driver.save(rows(0, 2)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1]


def test_C4_a_save_without_a_started_step_raises() -> None:
    """Warm-up and capture runs are never fed; nor can one step be saved twice."""
    driver = Driver()
    with pytest.raises(StepStateError, match="warm-up, profiling and graph-capture"):
        driver.save(rows(0, 1))
    driver.run({"a": (0, 1)}, rows(0, 1), new={"a": (0, (0,))})
    with pytest.raises(StepStateError, match="without an open step"):
        driver.save(rows(0, 1))
