"""W6 and the rest of W5: bounded waits, interrupts, movers that die."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import (
    CacheFailedError,
    CacheShutDownError,
    WaitTimeoutError,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import Operation
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.faults import begun, broken
from support.gated_backend import GatedBackend


@pytest.fixture(autouse=True)
def _expected_reports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="slotmirror.core")


def test_W6_the_committer_waits_for_a_stalled_device_without_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """100 time-outs long it reports and waits; when the device comes back all is well."""
    caplog.set_level(logging.WARNING, logger="slotmirror.core")
    backend = GatedBackend()
    driver = Driver(backend=backend, staging_claim_timeout_s=30)
    step_id = begun(driver)

    def stall(timeout_s: float) -> None:
        driver.runtime.now_s += timeout_s
        if driver.runtime.now_s >= 3000:
            backend.finish()

    backend.on_wait = stall
    driver.settle()
    assert driver.cache.stats()["fence_wait_warnings"] in (99, 100)
    assert "the device has not finished a copy for" in caplog.text
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3]


def test_W6_a_builders_wait_for_the_device_is_bounded() -> None:
    """It raises to this caller alone, names the step, and changes nothing."""
    backend = GatedBackend()
    driver = Driver(backend=backend, device_wait_timeout_s=9)
    step_id = begun(driver)
    with pytest.raises(WaitTimeoutError, match=rf"copy of step {step_id} in 9 s.*\[{step_id}\]"):
        driver.cache.materialize(step_id)
    backend.finish()
    assert driver.cache.materialize(step_id).hidden_states is not None


def test_W6_callers_wait_longer_while_the_head_waits_for_the_device() -> None:
    """A page wait lasts `device_wait_timeout_s` then, not `staging_claim_timeout_s`."""
    backend = GatedBackend()
    driver = Driver(
        backend=backend, staging_depth=1, staging_claim_timeout_s=2, device_wait_timeout_s=50
    )
    begun(driver)
    driver.cache._log.take(block=False)
    driver.cache._log.head_at_fence = True
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    with pytest.raises(
        WaitTimeoutError,
        match=r"after 50 s.*head operation 1 \(write step 1: 4 rows of \S+; queued\) is .*device",
    ):
        driver.save(rows(0, 1))
    assert driver.runtime.now_s == pytest.approx(50)


def test_W6_progress_of_the_log_extends_a_wait() -> None:
    """The bound counts from the last completed operation, not from the wait's beginning."""
    driver = Driver(staging_depth=1, staging_claim_timeout_s=10)
    step_id = begun(driver)
    driver.settle()
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    slow_steps = iter(range(3))

    def slow_progress() -> bool:
        if next(slow_steps, None) is None:
            return False
        driver.runtime.now_s += 9
        driver.cache._log.append([_Nothing()])
        return driver.cache._plane.committer.step()

    driver.runtime.actors.insert(0, slow_progress)
    with pytest.raises(WaitTimeoutError, match="after 10 s"):
        driver.save(rows(0, 1))
    assert driver.runtime.now_s == pytest.approx(3 * 9 + 10)
    driver.cache.discard_step(step_id)


def test_W6_a_wait_has_its_whole_bound_though_the_log_was_idle_for_long() -> None:
    """Nothing has moved for an hour, for nothing was to be moved: the page is waited for."""
    driver = Driver(staging_depth=1, staging_claim_timeout_s=10)
    step_id = begun(driver)
    driver.settle()
    driver.runtime.now_s = 3600
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    builder = iter([lambda: driver.cache.materialize(step_id)])

    def late_builder() -> bool:
        consume = next(builder, None)
        if consume is not None:
            driver.runtime.now_s += 9
            consume()
        return consume is not None

    driver.runtime.actors.append(late_builder)
    driver.save(rows(0, 1))
    assert driver.cache.stats()["page_wait_s"] == 9


def test_W6_a_bound_of_the_callers_own_is_not_extended_by_progress() -> None:
    """`quiesce(5)` takes five seconds at most, however busy the log is."""
    driver = Driver()
    begun(driver)

    def endless_work() -> bool:
        driver.runtime.now_s += 2
        assert driver.runtime.now_s < 50, "it waits for ever"
        driver.cache._log.append([_Nothing()])
        return driver.cache._plane.committer.step()

    driver.runtime.actors[:] = [endless_work]
    with pytest.raises(WaitTimeoutError, match="the log to drain after 5 s"):
        driver.cache.quiesce(5)
    assert driver.runtime.now_s == 6


def test_S3_a_save_that_waits_for_a_page_hears_of_a_shutdown_at_once() -> None:
    """Its page is a consumer's, which gives nothing back meanwhile."""
    driver = Driver(staging_depth=1)
    begun(driver)
    driver.settle()
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    shutdowns = iter([driver.cache._plane.ring.refuse_claims])

    def begin_shutdown() -> bool:
        begin = next(shutdowns, None)
        if begin is not None:
            begin()
        return begin is not None

    driver.runtime.actors[:] = [begin_shutdown]
    with pytest.raises(CacheShutDownError):
        driver.save(rows(0, 1))
    assert driver.runtime.now_s == 0


def test_W5_who_waits_hears_of_a_failure_at_once_though_the_mover_is_stuck() -> None:
    """A launch fails on the engine's thread; the mover waits for the device and tells nobody."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    begun(driver)
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    broken(driver, "copy_to_host", OSError("no launch"))
    saves = iter([lambda: driver.save(rows(0, 1))])

    def failing_save() -> bool:
        save = next(saves, None)
        if save is not None:
            with pytest.raises(CacheFailedError, match="no launch"):
                save()
        return save is not None

    driver.runtime.actors[:] = [failing_save]
    with pytest.raises(CacheFailedError, match="no launch"):
        driver.cache.quiesce(50)
    assert driver.runtime.now_s == 0


class _Nothing(Operation):
    """An operation that does nothing."""

    def run(self, mover: object) -> None:
        pass

    def describe(self) -> str:
        return "nothing"


def test_W5_an_interrupted_wait_frees_nothing_under_the_running_copy() -> None:
    """Ctrl-C in an inline fence wait: clones and page are kept until the copy has run (bug 31)."""
    backend = GatedBackend()
    driver = Driver(backend=backend, committer="inline")
    waits: list[int] = []

    def interrupt_once(_timeout_s: float) -> None:
        waits.append(driver.cache.stats()["pages_held"])  # type: ignore[arg-type]
        if len(waits) == 1:
            raise KeyboardInterrupt
        backend.finish()

    backend.on_wait = interrupt_once
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(KeyboardInterrupt):
        driver.save(rows(0, 4))
    assert waits == [1, 1]
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0


def test_W5_an_inline_mover_that_cannot_bind_fails_the_cache_not_the_call() -> None:
    """The save has happened: its id is returned, the failure comes from the next entry (C3)."""
    driver = Driver(committer="inline")
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    broken(driver, "bind_thread", OSError("no such device"))
    step_id = driver.save(rows(0, 4))
    with pytest.raises(CacheFailedError, match="no such device"):
        driver.cache.materialize(step_id)


def test_S2_an_interrupted_consumer_leaves_the_step_to_another_call() -> None:
    """Ctrl-C while it waits for the device: nothing was delivered, nothing is used up."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    step_id = begun(driver)

    def interrupt(_timeout_s: float) -> None:
        raise KeyboardInterrupt

    backend.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        driver.cache.materialize(step_id)
    backend.finish()
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3]


def test_W5_an_interrupt_while_an_inline_mover_binds_goes_on() -> None:
    """It is the engine's own Ctrl-C, so the call ends with it; the cache has failed."""
    driver = Driver(committer="inline")
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    broken(driver, "bind_thread", KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        driver.save(rows(0, 4))
    with pytest.raises(CacheFailedError, match="binding the mover's thread"):
        driver.cache.reset()


@pytest.mark.parametrize("member", ["bind_thread", "scatter_slots"])
def test_W5_a_mover_that_is_killed_goes_on_letting_go(member: str) -> None:
    """Even KeyboardInterrupt on its own thread: the cause is recorded, later pages come back."""

    class Killed(CpuRefBackend):
        def bind_thread(self, device: torch.device) -> None:
            if member == "bind_thread" and threading.current_thread().name.startswith("slotm"):
                raise KeyboardInterrupt

        def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
            if member == "scatter_slots":
                raise KeyboardInterrupt

    cache = PrefixCacheManager(PrefixCacheConfig(num_blocks=8, block_size=4), Killed())
    cache.register_policy(ModelCachePolicy())
    tables = BlockTables(num_blocks=8, block_size=4)
    for number in range(3):
        events = tables.step(
            new=[AdmittedRequest(f"r{number}", 0, (number,))],
            num_scheduled_tokens={f"r{number}": 2},
            num_computed_tokens={f"r{number}": 0},
        )
        try:
            cache.new_step_starts(events)
            cache.save_outputs(rows(0, 2), {}, num_tokens_unpadded=2)
        except CacheFailedError:
            break
    cache.shutdown()
    assert cache.stats()["failures"] == 1
    assert cache.stats()["pages_held"] == 0


def test_W2_a_second_bounce_buffer_that_cannot_be_had_loses_no_memory() -> None:
    """The first buffer is kept for the retry."""
    policy = ModelCachePolicy(needs_full_hidden_states=False, deferred_keys=frozenset({"codes"}))
    driver = Driver(policy=policy, copy_chunk_bytes=100)
    allocate = driver.backend.alloc_host
    sizes: list[int] = []

    def refuse_second(shape, dtype, *, pinned):  # type: ignore[no-untyped-def]
        sizes.append(shape[0])
        if len(sizes) == 2:
            raise MemoryError("no host memory")
        return allocate(shape, dtype, pinned=pinned)

    driver.backend.alloc_host = refuse_second  # type: ignore[method-assign]
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    with pytest.raises(MemoryError):
        driver.save(None, {"codes": rows(0, 1)}, num_tokens_unpadded=1)
    driver.cache.materialize(driver.save(None, {"codes": rows(0, 1)}, num_tokens_unpadded=1))
    assert sizes.count(100) == 3
    assert driver.cache.memory_stats()["bounce_bytes"] == 200
