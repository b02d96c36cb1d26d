"""Who wakes the mover: whoever needs it, and not the engine's thread for a step's write."""

from __future__ import annotations

import pytest

from slotmirror.core.runtime import Condition
from support.caches import Driver, rows
from support.driven_runtime import DrivenCondition


@pytest.fixture
def driver() -> Driver:
    return Driver(staging_depth=6)


def wake_ups(driver: Driver) -> int:
    """How often the mover was woken so far."""
    work: Condition = driver.cache._log._work
    assert isinstance(work, DrivenCondition)
    return work._notifications


def decode(driver: Driver, position: int) -> int:
    """A saved step of one request that computes one token."""
    new = {} if position else {"a": (0, (0, 1))}
    driver.start({"a": (position, 1)}, new=new)
    return driver.save(rows(position, 1))


def test_P1_a_save_wakes_nobody_and_its_consumer_wakes_the_mover(driver: Driver) -> None:
    """The write waits in the log until the step is delivered; then the mover is told."""
    step_id = decode(driver, 0)
    assert wake_ups(driver) == 0
    driver.cache.materialize(step_id)
    assert wake_ups(driver) == 1


def test_P1_a_consumer_wakes_nobody_when_nothing_is_queued(driver: Driver) -> None:
    """The write has been carried out: a wake-up would only cost the consumer its time."""
    step_id = decode(driver, 0)
    driver.settle()
    driver.cache.materialize(step_id)
    assert wake_ups(driver) == 0


def test_P1_a_discard_wakes_the_mover(driver: Driver) -> None:
    """Its release is behind the write, and nobody else will come for either."""
    driver.cache.discard_step(decode(driver, 0))
    assert wake_ups(driver) == 1


def test_P1_writes_that_nobody_comes_for_wake_the_mover_in_the_end(driver: Driver) -> None:
    """Two may wait; the third is one too many."""
    for position in range(2):
        decode(driver, position)
    assert wake_ups(driver) == 0
    decode(driver, 2)
    assert wake_ups(driver) == 1


def test_P1_reading_hits_wakes_the_mover_at_once(driver: Driver) -> None:
    """A gather runs while the forward runs, and with it the writes before it."""
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.save(rows(0, 4))
    assert wake_ups(driver) == 0
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))})
    assert wake_ups(driver) == 1


def test_P1_a_save_that_appends_reads_too_wakes_the_mover_at_once() -> None:
    """Without prefetch a step's reads come with its save: one of the two is urgent, and counts."""
    driver = Driver(staging_depth=6, prefetch=False)
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.save(rows(0, 4))
    driver.settle()
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))})
    assert wake_ups(driver) == 0
    driver.save(rows(4, 1))
    assert driver.cache.stats()["log_length"] == 2
    assert wake_ups(driver) == 1


def test_W6_whoever_waits_wakes_the_mover(driver: Driver) -> None:
    """`quiesce` ends although no append woke anybody."""
    decode(driver, 0)
    before = wake_ups(driver)
    driver.cache.quiesce(5)
    assert wake_ups(driver) > before
    assert driver.cache.stats()["log_length"] == 0
