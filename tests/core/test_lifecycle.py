"""L: continuations, preemption and resume, delivered positions; R: reset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slotmirror.core.errors import (
    CacheFailedError,
    EngineDivergenceError,
    MissingRowsError,
    ReplayOrderError,
    RowLayoutError,
    StepStateError,
    UnknownRequestError,
)
from support.caches import Driver, firsts, rows


def delivered(driver: Driver, step_id: int, req_id: str) -> tuple[tuple[int, int], list[float]]:
    """Consume a step: the request's span, and the first element of each row."""
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    return out.spans[req_id], firsts(out.hidden_states[req_id])


def test_L1_a_live_id_among_new_requests_is_a_continuation() -> None:
    """No hit span, nothing delivered twice; an odd number of computed tokens is fine (D4)."""
    driver = Driver()
    driver.run({"a": (0, 3)}, rows(0, 3), new={"a": (0, (0,))})
    out = driver.run({"a": (3, 2)}, rows(3, 2), new={"a": (3, (0, 1))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [3, 4]
    assert out.spans["a"] == (3, 5)


def test_L1_after_it_finished_the_same_id_is_new() -> None:
    """A new owner of an old id gets its whole hit."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    out = driver.run({"a": (4, 1)}, rows(9, 1), new={"a": (4, (0, 1))}, ended=["a"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("route", ["new", "resumed"])
@pytest.mark.parametrize("same_event", [True, False])
def test_L2_preempted_and_resumed_by_either_route(route: str, same_event: bool) -> None:
    """Delivered 8, resumed with a hit of 16 and scheduled to 20: exactly rows 8 to 19."""
    driver = Driver(num_blocks=16)
    driver.run({"x": (0, 16)}, rows(0, 16), new={"x": (0, (0, 1, 2, 3))})
    out = driver.run({"a": (4, 4)}, rows(4, 4), new={"a": (4, (0, 4))})
    assert out.spans["a"] == (0, 8)
    if not same_event:
        driver.start({}, preempted=["a"])
    resume = {route: {"a": (16, (0, 1, 2, 3, 5))}}
    if same_event:
        resume["preempted"] = ["a"]  # type: ignore[assignment]
    out = driver.run({"a": (16, 4)}, rows(16, 4), **resume)
    assert out.hidden_states is not None
    assert out.spans["a"] == (8, 20)
    assert firsts(out.hidden_states["a"]) == list(range(8, 20))


def test_L2_a_smaller_hit_on_resume_saves_again_and_delivers_once() -> None:
    """Delivered 8, hit of 4, rows 4 to 11 recomputed: saved all, delivered 8 to 11."""
    driver = Driver()
    driver.run({"a": (0, 8)}, rows(0, 8), new={"a": (0, (0, 1))})
    out = driver.run({"a": (4, 8)}, rows(104, 8), preempted=["a"], resumed={"a": (4, (0, 2, 3))})
    assert out.hidden_states is not None
    assert out.spans["a"] == (8, 12)
    assert firsts(out.hidden_states["a"]) == [108, 109, 110, 111]
    out = driver.run({"b": (12, 1)}, rows(0, 1), new={"b": (12, (0, 2, 3, 4))}, ended=["a"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"])[4:8] == [104, 105, 106, 107]


def test_L2_any_number_of_times() -> None:
    """Five preemptions with chunks in between: every position exactly once."""
    driver = Driver(num_blocks=16)
    positions: list[float] = []
    blocks = (0, 1, 2, 3, 4, 5)
    done = 0
    for round_ in range(5):
        hit = done - done % 4
        admitted = {"a": (hit, blocks)}
        kwargs = {"new": admitted} if not round_ else {"preempted": ["a"], "resumed": admitted}
        end = done + 3
        out = driver.run({"a": (hit, end - hit)}, rows(hit, end - hit), **kwargs)
        assert out.hidden_states is not None
        positions += firsts(out.hidden_states["a"])
        done = end
    assert positions == list(range(15))


def test_L3_a_replay_is_cut_again_when_it_is_materialized() -> None:
    """Planned with 0 delivered, materialized after 4 were: rows 4 to 8, none twice (bug 27)."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    first = driver.save(rows(0, 4))
    driver.start({"a": (4, 1)}, preempted=["a"], resumed={"a": (4, (0, 1))})
    replay = driver.save(rows(4, 1))
    assert delivered(driver, first, "a") == ((0, 4), [0, 1, 2, 3])
    assert delivered(driver, replay, "a") == ((4, 5), [4])


def test_L3_a_replay_waits_for_its_owners_earlier_steps() -> None:
    """Out of order it raises and names them; nothing is consumed."""
    driver = Driver()
    driver.start({"a": (0, 4), "b": (0, 1)}, new={"a": (0, (0,)), "b": (0, (2,))})
    first = driver.save(rows(0, 5))
    driver.start({"a": (4, 1), "b": (1, 1)}, preempted=["a"], resumed={"a": (4, (0, 1))})
    replay = driver.save(rows(4, 2))
    with pytest.raises(ReplayOrderError, match=rf"replays positions of \['a'\].*\[{first}\] first"):
        driver.cache.materialize(replay)
    driver.cache.materialize(first)
    assert delivered(driver, replay, "a") == ((4, 5), [4])


def test_L3_a_late_builder_finds_the_progress_of_an_owner_that_has_ended() -> None:
    """The owner ends, its id is reused, then its replay is materialized: still cut, none twice."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    first = driver.save(rows(0, 4))
    driver.start({"a": (4, 1)}, preempted=["a"], resumed={"a": (4, (0, 1))})
    replay = driver.save(rows(4, 1))
    driver.start({"a": (0, 2)}, ended=["a"], new={"a": (0, (3,))})
    successor = driver.save(rows(70, 2))
    assert delivered(driver, first, "a") == ((0, 4), [0, 1, 2, 3])
    assert delivered(driver, replay, "a") == ((4, 5), [4])
    assert delivered(driver, successor, "a") == ((0, 2), [70, 71])


def test_L3_other_steps_are_consumed_in_any_order_as_they_are() -> None:
    """Three chunks, last first: each delivers its own rows."""
    driver = Driver()
    steps = []
    for start in (0, 2, 4):
        new = {"new": {"a": (0, (0, 1))}} if not start else {}
        driver.start({"a": (start, 2)}, **new)
        steps.append((start, driver.save(rows(start, 2))))
    for start, step_id in reversed(steps):
        assert delivered(driver, step_id, "a") == ((start, start + 2), [start, start + 1])


def test_L3_a_discard_leaves_a_gap_that_only_a_later_hit_fills() -> None:
    """Spans report the gap; the next legal step does not raise (bug 28); the resume fills it."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0, 1))})
    driver.cache.discard_step(driver.save(rows(0, 4)))
    driver.start({"a": (4, 1)}, preempted=["a"], resumed={"a": (4, (0, 1))})
    step_id = driver.save(rows(4, 1))
    assert delivered(driver, step_id, "a") == ((0, 5), [0, 1, 2, 3, 4])


def test_L3_requests_left_out_of_a_call_leave_a_gap_too() -> None:
    """`materialize(sid, ["a"])` consumes the step for b as well; b's next rows come as they are."""
    driver = Driver()
    driver.start({"a": (0, 1), "b": (0, 1)}, new={"a": (0, (0,)), "b": (0, (1,))})
    step_id = driver.save(rows(0, 2))
    assert list(driver.cache.materialize(step_id, ["a"]).spans) == ["a"]
    driver.start({"b": (1, 1)})
    assert delivered(driver, driver.save(rows(7, 1)), "b") == ((1, 2), [7])


def test_L4_a_late_call_never_touches_a_successors_progress() -> None:
    """Generation 1's step is consumed after generation 2 started: 2 still gets all of its own."""
    driver = Driver()
    driver.start({"a": (0, 8)}, new={"a": (0, (0, 1))})
    old = driver.save(rows(0, 8))
    driver.start({"a": (0, 4)}, ended=["a"], new={"a": (0, (2,))})
    first = driver.save(rows(50, 4))
    driver.cache.materialize(old)
    driver.start({"a": (4, 1)}, preempted=["a"], resumed={"a": (4, (2, 3))})
    replay = driver.save(rows(54, 1))
    assert delivered(driver, first, "a") == ((0, 4), [50, 51, 52, 53])
    assert delivered(driver, replay, "a") == ((4, 5), [54])


def test_L5_a_replaced_prompt_is_a_new_generation_from_zero() -> None:
    """Same live id, another prompt: its whole hit is delivered, the old rows stay hittable."""
    driver = Driver()
    driver.run({"a": (0, 8)}, rows(0, 8), new={"a": (0, (0, 1))})
    out = driver.run({"a": (4, 2)}, rows(50, 2), new={"a": (4, (0, 2))}, replaced=["a"])
    assert out.hidden_states is not None
    assert out.spans["a"] == (0, 6)
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3, 50, 51]
    out = driver.run({"b": (8, 1)}, rows(9, 1), new={"b": (8, (0, 1, 3))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    with pytest.raises(UnknownRequestError, match=r"replaced, but not among the new: \['a'\]"):
        driver.start({"a": (6, 1)}, replaced=["a"])


def test_L5_a_late_step_of_the_old_prompt_is_delivered_as_it_was() -> None:
    """The old generation's step is consumed after the replacement; progress is not mixed (L4)."""
    driver = Driver()
    driver.start({"a": (0, 8)}, new={"a": (0, (0, 1))})
    old = driver.save(rows(0, 8))
    driver.start({"a": (0, 3)}, new={"a": (0, (2,))}, replaced=["a"])
    new = driver.save(rows(70, 3))
    assert delivered(driver, old, "a") == ((0, 8), [0, 1, 2, 3, 4, 5, 6, 7])
    assert delivered(driver, new, "a") == ((0, 3), [70, 71, 72])


def test_L7_rejected_drafts_are_overwritten_and_never_delivered() -> None:
    """4 tokens with 3 drafts, 1 of them accepted: 2 rows delivered, the rest computed again."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0, 1, 2))})
    driver.start({"a": (4, 4)}, drafted=["a"])
    drafted = driver.save(rows(4, 4))
    with pytest.raises(StepStateError, match="drafts that are not verified yet"):
        driver.cache.materialize(drafted)
    driver.start({"a": (6, 4)}, drafted=["a"], verified_positions={"a": 6})
    again = driver.save(rows(106, 4))
    assert delivered(driver, drafted, "a") == ((4, 6), [4, 5])
    driver.start({}, ended=["a"], verified_positions={"a": 10})
    assert delivered(driver, again, "a") == ((6, 10), [106, 107, 108, 109])
    out = driver.run({"b": (8, 1)}, rows(9, 1), new={"b": (8, (0, 1, 3))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4, 5, 106, 107, 9]


def test_L7_a_resume_after_rejected_drafts_delivers_their_positions() -> None:
    """Rejected drafts count as neither saved nor delivered: the resume gives their true rows."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0, 1))})
    driver.start({"a": (4, 3)}, drafted=["a"])
    step_id = driver.save(rows(4, 3))
    driver.start({}, preempted=["a"], verified_positions={"a": 5})
    assert delivered(driver, step_id, "a") == ((4, 5), [4])
    driver.start({"a": (4, 3)}, resumed={"a": (4, (0, 2))})
    assert delivered(driver, driver.save(rows(104, 3)), "a") == ((5, 7), [105, 106])


def test_L7_requests_without_drafts_share_a_drafted_step() -> None:
    """Only the drafted request is trimmed."""
    driver = Driver()
    driver.start({"a": (0, 3), "b": (0, 3)}, new={"a": (0, (0,)), "b": (0, (1,))}, drafted=["b"])
    step_id = driver.save(rows(0, 6))
    driver.start({}, verified_positions={"b": 1})
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2]
    assert firsts(out.hidden_states["b"]) == [3]
    assert dict(out.spans) == {"a": (0, 3), "b": (0, 1)}


@pytest.mark.parametrize("positions", [{}, {"a": 4}, {"a": 9}])
def test_L7_missing_or_impossible_verified_positions_are_refused(positions: dict[str, int]) -> None:
    """At least the first token is accepted, at most all of them; nothing changes otherwise."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0, 1, 2))})
    driver.start({"a": (4, 4)}, drafted=["a"])
    step_id = driver.save(rows(4, 4))
    with pytest.raises(EngineDivergenceError, match=r"computed drafts of \['a'\]"):
        driver.start({"a": (6, 1)}, verified_positions=positions)
    driver.start({"a": (6, 1)}, verified_positions={"a": 6})
    assert delivered(driver, step_id, "a") == ((4, 6), [4, 5])


def test_L6_a_step_with_no_tokens_but_with_ended_requests_is_seen() -> None:
    """Control-only: nothing to save, and the ended id is free for a new owner."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    driver.start({}, ended=["a"])
    with pytest.raises(StepStateError, match="without an open step"):
        driver.save(None, num_tokens_unpadded=0)
    out = driver.run({"a": (4, 1)}, rows(9, 1), new={"a": (4, (0, 1))})
    assert out.spans["a"] == (0, 5)
    assert driver.cache.stats()["steps_abandoned"] == 0


def test_unknown_and_stopped_requests_are_refused() -> None:
    """Running without being known, resuming after the end, running while preempted, twice."""
    driver = Driver()
    driver.run({"a": (0, 1)}, rows(0, 1), new={"a": (0, (0,))})
    with pytest.raises(UnknownRequestError, match=r"without a block table: \['z'\]"):
        driver.start({"z": (0, 1)})
    with pytest.raises(UnknownRequestError, match=r"resumed: \['z'\]"):
        driver.start({"z": (0, 1)}, resumed={"z": (0, (3,))})
    running = driver.tables.step(
        num_scheduled_tokens={"a": 1}, num_computed_tokens={"a": 1}, appended={"a": (1,)}
    )
    with pytest.raises(EngineDivergenceError, match=r"\['a'\] are scheduled although"):
        driver.cache.new_step_starts(replace(running, preempted=("a",)))
    twice = replace(
        running,
        req_ids=("a", "a"),
        first_positions=running.first_positions.repeat(2),
        num_tokens=running.num_tokens.repeat(2),
        slots=running.slots.repeat(2),
    )
    with pytest.raises(RowLayoutError, match="scheduled twice"):
        driver.cache.new_step_starts(twice)


def test_R1_reset_makes_every_slot_absent_and_leaves_steps_in_flight_alone() -> None:
    """A step saved before the reset is delivered; a hit after it finds nothing and raises."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    step_id = driver.save(rows(0, 4))
    driver.cache.reset()
    assert delivered(driver, step_id, "a") == ((0, 4), [0, 1, 2, 3])
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))}, ended=["a"])
    with pytest.raises(MissingRowsError):
        driver.cache.materialize(driver.save(rows(9, 1)))


def test_R1_a_step_open_at_the_reset_is_delivered_but_not_kept() -> None:
    """Its rows were computed with what the reset threw away."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.cache.reset()
    assert delivered(driver, driver.save(rows(0, 4)), "a") == ((0, 4), [0, 1, 2, 3])
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))}, ended=["a"])
    with pytest.raises(MissingRowsError):
        driver.cache.materialize(driver.save(rows(9, 1)))


def test_R2_after_a_sticky_failure_the_error_asks_for_a_new_manager() -> None:
    """Reset does not help; the message says what does."""
    driver = Driver()
    driver.cache._log.poison(OSError("gone"), "a test")
    with pytest.raises(CacheFailedError, match="shut this manager down and make a new one"):
        driver.cache.reset()
