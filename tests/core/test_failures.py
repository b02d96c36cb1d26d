"""W3, W5, W6: aborts still write; failures are sticky; waits are bounded."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from slotmirror.core.errors import (
    CacheFailedError,
    DeviceError,
    GatherFailedError,
    without_tracebacks,
)
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.driven_runtime import LockCheckedBackend
from support.faults import begun, broken
from support.gated_backend import GatedBackend


@pytest.fixture(autouse=True)
def _expected_reports(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="slotmirror.core")


def test_W3_abort_still_writes() -> None:
    """A request aborted in the step after its save: its rows land, a hit reads them."""
    driver = Driver()
    driver.cache.discard_step(begun(driver))
    out = driver.run({"b": (4, 1)}, rows(9, 1), new={"b": (4, (0, 1))}, ended=["a"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("committer", ["threaded", "inline"])
def test_W5_a_failed_pool_write_is_sticky(committer: str) -> None:
    """The first cause comes from every later entry; pages come back; later writes are dropped."""
    driver = Driver(committer=committer)
    broken(driver, "scatter_slots", OSError("pool gone"))
    step_id = begun(driver)
    driver.settle()
    entries = (
        lambda: driver.start({"b": (0, 1)}, new={"b": (0, (1,))}),
        lambda: driver.save(rows(0, 1)),
        lambda: driver.cache.materialize(step_id),
        lambda: driver.cache.quiesce(1),
        driver.cache.reset,
    )
    for entry in entries:
        with pytest.raises(CacheFailedError, match="OSError: pool gone") as caught:
            entry()
        assert isinstance(caught.value.cause, OSError)
    assert driver.cache.stats()["failures"] == 1
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0


def test_W5_operations_behind_a_failure_are_dropped_and_let_go() -> None:
    """Two writes are queued; the first fails; the second moves nothing, its page comes back."""
    driver = Driver()
    moved: list[int] = []
    broken(driver, "scatter_slots", OSError("pool gone"))
    first, second = begun(driver, "a", 0), begun(driver, "b", 1)
    driver.cache._plane.committer.step()
    driver.backend.scatter_slots = lambda pool, slots, rows: moved.append(len(rows))  # type: ignore[method-assign]
    driver.settle()
    assert not moved
    assert driver.cache.stats()["operations_dropped"] == 1
    assert sorted(driver.cache.stats()["unconsumed_steps"]) == [first, second]
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0


def test_W5_a_failed_gather_fails_its_step_alone() -> None:
    """The hit's step cannot be delivered; no row is lost, the next hit reads them."""
    driver = Driver()
    driver.cache.materialize(begun(driver))
    gather = driver.backend.gather_slots
    broken(driver, "gather_slots", OSError("torn"))
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))})
    step_id = driver.save(rows(9, 1))
    with pytest.raises(GatherFailedError, match=r"__hidden_states__.*OSError: torn.*discard"):
        driver.cache.materialize(step_id)
    driver.cache.discard_step(step_id)
    driver.backend.gather_slots = gather  # type: ignore[method-assign]
    out = driver.run({"c": (4, 1)}, rows(8, 1), new={"c": (4, (0, 2))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [0, 1, 2, 3, 8]


def test_W5_a_failed_launch_is_sticky_and_keeps_its_buffers_until_it_has_run() -> None:
    """Half of a launch may run: the page and the clones live until the fence behind it."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    launch = backend.copy_to_host
    clones: list[weakref.ref[torch.Tensor]] = []

    def half(pairs, stream, after, fence):  # type: ignore[no-untyped-def]
        launch(pairs[:1], stream, after, fence)
        clones.extend(weakref.ref(source) for source, _ in pairs)
        raise OSError("second copy refused")

    backend.copy_to_host = half  # type: ignore[method-assign]
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(CacheFailedError, match="second copy refused"):
        driver.save(rows(0, 4), {"codes": rows(5, 4)})
    gc.collect()
    assert driver.cache.stats()["pages_held"] == 1
    assert all(clone() is not None for clone in clones)
    backend.on_wait = lambda _timeout_s: backend.finish()
    driver.settle()
    gc.collect()
    assert driver.cache.stats()["pages_held"] == 0
    assert all(clone() is None for clone in clones)


def test_W5_an_inline_save_whose_launch_fails_has_given_its_page_back() -> None:
    """Nobody else would carry the release out."""
    driver = Driver(committer="inline")
    broken(driver, "copy_to_host", OSError("no launch"))
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(CacheFailedError, match="no launch"):
        driver.save(rows(0, 4))
    assert driver.cache.stats()["pages_held"] == 0
    assert driver.cache.stats()["log_length"] == 0


def test_W5_a_failed_clone_changes_nothing_and_the_save_may_be_repeated() -> None:
    """Nothing was launched: the page comes back, the step stays open."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    snapshot = backend.snapshot
    broken(driver, "snapshot", torch.OutOfMemoryError("no device memory"))
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(torch.OutOfMemoryError):
        driver.save(rows(0, 4))
    assert driver.cache.stats()["pages_held"] == 0
    backend.snapshot = snapshot  # type: ignore[method-assign]
    step_id = driver.save(rows(0, 4))
    backend.finish()
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2, 3]


def test_W5_a_lost_device_fails_the_builder_and_then_the_cache() -> None:
    """The consumer gets the device's error; so does everybody once the mover has met it."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    step_id = begun(driver)
    backend.lost = RuntimeError("device lost")
    with pytest.raises(DeviceError, match=f"copy of step {step_id} failed: device lost"):
        driver.cache.materialize(step_id)
    driver.settle()
    with pytest.raises(CacheFailedError, match="device lost"):
        driver.cache.reset()
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0
    # A copy that failed has ended: its page is free, not kept for ever.
    assert driver.cache.stats()["pages_stranded"] == 0
    assert driver.cache.memory_stats()["staging_bytes"] == 0


def test_W5_waiters_wake_after_the_failure_is_recorded() -> None:
    """A save that waits for a page when the mover fails raises the cause, not a time-out."""
    driver = Driver(staging_depth=1)
    broken(driver, "scatter_slots", OSError("pool gone"))
    driver.cache.materialize(begun(driver))
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    with pytest.raises(CacheFailedError, match="pool gone"):
        driver.save(rows(0, 1))
    assert driver.runtime.now_s == 0


def test_W5_the_kept_failure_keeps_no_traceback() -> None:
    """A stored traceback would keep the failed write's frames, and what they hold, alive."""
    driver = Driver()
    broken(driver, "scatter_slots", OSError("pool gone"))
    begun(driver)
    driver.settle()
    failure = driver.cache._log.failure
    assert failure is not None
    assert failure[0].__traceback__ is None


def test_W5_inline_records_its_failure_and_raises_at_the_next_entry() -> None:
    """The save itself returns its step id; the failure comes from the call after it."""
    driver = Driver(committer="inline")
    broken(driver, "scatter_slots", OSError("pool gone"))
    step_id = begun(driver)
    with pytest.raises(CacheFailedError, match="pool gone"):
        driver.cache.materialize(step_id)


def test_a_mover_that_dies_poisons_the_log() -> None:
    """Even SystemExit inside an operation is recorded; nobody waits for a dead thread."""
    driver = Driver()
    broken(driver, "scatter_slots", SystemExit(3))  # type: ignore[arg-type]
    begun(driver)
    driver.settle()
    with pytest.raises(CacheFailedError, match="SystemExit: 3"):
        driver.cache.reset()


def test_failures_of_leftover_only_steps_release_their_page() -> None:
    """A poisoned log still lets a leftover-only step's page go."""
    driver = Driver(policy=ModelCachePolicy(needs_full_hidden_states=False))
    assert isinstance(driver.backend, LockCheckedBackend)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    driver.save(None, {"x": torch.arange(3)}, num_tokens_unpadded=1)
    driver.cache._log.poison(OSError("elsewhere"), "a test")
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0


def test_W5_a_kept_failure_drops_the_tracebacks_of_cause_and_context() -> None:
    """An error that was raised from one error while another was handled keeps neither's frames."""
    try:
        try:
            raise LookupError("context")
        except LookupError:
            raise RuntimeError("kept") from OSError("cause")
    except RuntimeError as error:
        kept = without_tracebacks(error)
    assert isinstance(kept.__context__, LookupError)
    assert [e and e.__traceback__ for e in (kept, kept.__cause__, kept.__context__)] == [None] * 3
