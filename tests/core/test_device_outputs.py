"""Outputs on the device: their host side lives until the copy has run, and no longer (M3, S3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.simulated import FaultKind, InjectedFault, SimulatedBackend
from slotmirror.core.merge import StageOutputs
from support.caches import Driver, firsts, rows


class HandPaced:
    """Queues move when the test moves them; `on_look` is told when somebody looks at a fence."""

    def __init__(self) -> None:
        self.on_look: Callable[[], object] = lambda: None

    def call(self, member: str) -> None:
        if member in ("done", "wait"):
            self.on_look()

    def wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        return reached()


def sending(steps: int) -> tuple[Driver, SimulatedBackend, HandPaced, list[int]]:
    """A cache with so many saved steps of four rows each; the rows lie on their pages."""
    pacing = HandPaced()
    backend = SimulatedBackend(pacing=pacing)
    driver = Driver(backend=backend, num_blocks=16)
    ids = []
    for number in range(steps):
        name = f"r{number}"
        driver.start({name: (0, 4)}, new={name: (0, (number,))})
        ids.append(driver.save(backend.upload(rows(10 * number, 4))))
    move_all(backend)
    driver.settle()
    return driver, backend, pacing, ids


def move_all(backend: SimulatedBackend) -> None:
    while backend.advance():
        pass


def sent(driver: Driver, step_id: int) -> StageOutputs:
    return driver.cache.materialize(step_id, device=True)


def test_two_builders_that_look_at_the_same_copy_let_go_of_it_once() -> None:
    """The source of the next copy, which still runs, stays alive."""
    driver, backend, pacing, ids = sending(4)
    first, out = sent(driver, ids[0]), sent(driver, ids[1])
    assert first.arrival is not None
    while not first.arrival.done():
        backend.advance()

    def another_builder() -> None:
        pacing.on_look = lambda: None
        sent(driver, ids[3])

    pacing.on_look = another_builder
    sent(driver, ids[2])
    move_all(backend)
    assert backend.violations == []
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["r1"]) == [10, 11, 12, 13]
    driver.cache.shutdown()


def test_a_builder_lets_go_of_what_has_reached_the_device_before_it_sends_more() -> None:
    """Without hits and without a shutdown, too."""
    driver, backend, _, ids = sending(2)
    sent(driver, ids[0])
    move_all(backend)
    sent(driver, ids[1])
    assert len(driver.cache._plane.device_outputs._running) == 1
    move_all(backend)
    driver.cache.shutdown()


def test_S3_a_shutdown_lets_go_of_the_host_side_of_outputs_on_the_device() -> None:
    """Hit outputs that were sent do not stay alive for ever."""
    driver, backend, _, ids = sending(2)
    for step_id in ids:
        driver.cache.materialize(step_id)
    name = "hit"
    driver.start({name: (4, 1)}, new={name: (4, (0, 8))})
    driver.settle()
    hit = driver.save(backend.upload(rows(70, 1)))
    move_all(backend)
    driver.settle()
    out = sent(driver, hit)
    assert driver.cache.memory_stats()["hit_output_bytes"] > 0
    move_all(backend)
    driver.cache.shutdown()
    assert driver.cache.memory_stats()["hit_output_bytes"] == 0
    assert out.hidden_states is not None
    assert firsts(out.hidden_states[name]) == [0, 1, 2, 3, 70]


@pytest.mark.parametrize("fails", [False, True])
def test_S3_a_shutdown_ends_though_a_copy_to_the_device_failed(fails: bool) -> None:
    """Its receiver learns it from the fence; pool and pages are given back all the same."""
    driver, backend, _, ids = sending(1)
    out = sent(driver, ids[0])
    if fails:
        backend.faults.arm(FaultKind.COPY_RUN, 1)
    move_all(backend)
    with quiet_core():
        driver.cache.shutdown()
    assert sum(driver.cache.memory_stats().values()) == 0
    assert out.arrival is not None
    if fails:
        with pytest.raises(InjectedFault):
            out.arrival.wait(1.0)


def test_M3_outputs_that_have_reached_the_device_are_not_alive_for_the_next_hit() -> None:
    """Their host side is let go before the limit is checked, also when nobody sends again."""
    pacing = HandPaced()
    backend = SimulatedBackend(pacing=pacing)
    driver = Driver(backend=backend, num_blocks=16, hit_buffer_bytes_max=100)
    driver.start({"a": (0, 8)}, new={"a": (0, (0, 1))})
    move_all(backend)
    driver.cache.discard_step(driver.save(backend.upload(rows(0, 8))))
    move_all(backend)
    driver.settle()
    for name, block in (("b", 2), ("c", 3)):
        driver.start({name: (8, 1)}, new={name: (8, (0, 1, block))})
        step_id = driver.save(backend.upload(rows(8, 1)))
        move_all(backend)
        driver.settle()
        out = sent(driver, step_id)
        move_all(backend)
        assert out.arrival is not None
        assert out.arrival.done()
        del out
