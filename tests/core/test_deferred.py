"""W2, W4, H4, H6: the open batch of deferred rows, and the device bytes that it takes."""

from __future__ import annotations

import logging

import pytest
import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.errors import CacheFailedError, ConfigError, WaitTimeoutError
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.gated_backend import GatedBackend

DEFER_CODES = ModelCachePolicy(needs_full_hidden_states=False, deferred_keys=frozenset({"codes"}))
ROW_BYTES = 8


def deferring(**settings: object) -> Driver:
    """A driver whose only key is deferred."""
    return Driver(policy=DEFER_CODES, **settings)  # type: ignore[arg-type]


def closed(driver: Driver) -> object:
    """How many batches were closed, by reason."""
    return driver.cache.stats()["batches_closed"]


def steps(driver: Driver, name: str, count: int, block: int, *, start: int = 0) -> None:
    """`count` steps of one row each, consumed as they come."""
    for position in range(count):
        new = {"new": {name: (0, (block,))}} if position == 0 else {}
        out = driver.run({name: (position, 1)}, None, {"codes": rows(start + position, 1)}, **new)
        assert firsts(out.mm_outputs["codes"][name]) == [start + position]


def test_W2_deferred_rows_wait_in_one_batch_for_all_requests() -> None:
    """Delivered in their own step, written to the pool only when a request ends."""
    driver = deferring()
    steps(driver, "a", 3, 0)
    steps(driver, "b", 2, 1, start=50)
    driver.settle()
    assert driver.cache.stats()["rows_written"] == 0
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 5 * ROW_BYTES
    driver.start({}, ended=["a"])
    driver.settle()
    assert closed(driver) == {"ended": 1}
    assert driver.cache.stats()["rows_written"] == 5
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0
    assert "write deferred batch of 5 steps: 5 rows of codes" in driver.cache.log_tail()[-1]


def test_W2_a_preemption_closes_the_batch_and_the_next_rows_open_another() -> None:
    """A closed batch never grows."""
    driver = deferring()
    steps(driver, "a", 4, 0)
    driver.start({}, preempted=["a"])
    driver.run({"a": (4, 1)}, None, {"codes": rows(4, 1)}, resumed={"a": (4, (0, 1))})
    assert closed(driver) == {"preempted": 1}
    driver.cache.shutdown()
    assert closed(driver) == {"preempted": 1, "shutdown": 1}
    assert driver.cache.stats()["rows_written"] == 5


def test_W2_half_the_budget_closes_the_batch() -> None:
    """One long request cannot pin the whole budget (historical bug 8)."""
    driver = deferring(device_staging_bytes_max=8 * ROW_BYTES)
    steps(driver, "a", 4, 0)
    assert closed(driver) == {"budget": 1}
    assert driver.cache.stats()["device_bytes_high"] == 4 * ROW_BYTES


def test_W2_an_end_of_somebody_without_rows_in_the_batch_closes_nothing() -> None:
    """Only requests with rows in the batch count."""
    driver = deferring()
    driver.run({"a": (0, 1)}, None, {"other": rows(1, 1)}, new={"a": (0, (5,))})
    steps(driver, "b", 2, 1)
    driver.start({}, ended=["a"])
    assert closed(driver) == {}


def test_W2_immediate_keys_of_the_same_step_are_written_at_once() -> None:
    """Each key has its own schedule."""
    driver = Driver(policy=ModelCachePolicy(deferred_keys=frozenset({"codes"})))
    driver.run({"a": (0, 2)}, rows(0, 2), {"codes": rows(9, 2)}, new={"a": (0, (0,))})
    driver.settle()
    assert driver.cache.stats()["rows_written"] == 2
    driver.start({}, ended=["a"])
    driver.settle()
    assert driver.cache.stats()["rows_written"] == 4


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 100])
def test_W2_the_batch_goes_through_two_bounce_buffers(chunk_rows: int) -> None:
    """Whatever fits a buffer: every row arrives, of two keys with different widths."""
    policy = ModelCachePolicy(
        needs_full_hidden_states=False, deferred_keys=frozenset({"codes", "wide"})
    )
    driver = Driver(policy=policy, copy_chunk_bytes=chunk_rows * 32)
    wide = rows(70, 5, 8)
    driver.run({"a": (0, 5)}, None, {"codes": rows(0, 5), "wide": wide}, new={"a": (0, (0, 1))})
    driver.run({"a": (5, 3)}, None, {"codes": rows(5, 3)})
    out = driver.run({"b": (8, 1)}, None, {}, new={"b": (8, (0, 1, 2))}, ended=["a"])
    assert firsts(out.mm_outputs["codes"]["b"]) == list(range(8))
    assert firsts(out.mm_outputs["wide"]["b"]) == [70, 71, 72, 73, 74, 0, 0, 0]
    assert driver.cache.memory_stats()["bounce_bytes"] == 2 * chunk_rows * 32


def test_W2_small_clones_are_copied_together() -> None:
    """Eight clones of a row each, four to a bounce buffer: two copies, both full."""
    driver = deferring(copy_chunk_bytes=4 * ROW_BYTES)
    steps(driver, "a", 4, 0)
    steps(driver, "b", 4, 1)
    copied: list[int] = []
    copy_to_host = driver.backend.copy_to_host

    def noting(pairs, *others):  # type: ignore[no-untyped-def]
        copied.append(len(pairs))
        copy_to_host(pairs, *others)

    driver.backend.copy_to_host = noting  # type: ignore[method-assign]
    driver.start({}, ended=["a"])
    driver.settle()
    assert copied == [4, 4]


def test_W1_a_deferred_write_is_copying_until_its_last_copy_has_arrived() -> None:
    """A report made while the mover waits for the device does not call the rows host-ready."""
    backend = GatedBackend()
    backend.on_wait = lambda timeout_s: backend.finish()
    driver = Driver(backend=backend, policy=DEFER_CODES)
    driver.run({"a": (0, 1)}, None, {"codes": rows(0, 1)}, new={"a": (0, (0,))})
    driver.start({}, ended=["a"])
    reports: list[str] = []

    def note(timeout_s: float) -> None:
        reports.append(driver.cache._log.report())
        backend.finish()

    backend.on_wait = note
    driver.settle()
    assert len(reports) == 1
    assert "; copying) is waiting for the device" in reports[0]


def test_W2_a_row_that_fits_no_bounce_buffer_names_the_setting() -> None:
    """Refused at the save, before anything is allocated; the step goes on without the key."""
    driver = deferring(copy_chunk_bytes=ROW_BYTES - 1)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    with pytest.raises(ConfigError, match=r"copy_chunk_bytes=7: must hold one row.*8 B"):
        driver.save(None, {"codes": rows(0, 1)}, num_tokens_unpadded=1)
    driver.cache.discard_step(driver.save(None, {}, num_tokens_unpadded=1))


def test_W4_bytes_are_reserved_before_the_clone_and_released_once() -> None:
    """Also when the clone fails afterwards (historical bug 12)."""
    driver = deferring()
    backend = driver.backend
    seen: list[int] = []

    def fail(tensors: object) -> list[torch.Tensor]:
        seen.append(driver.cache.memory_stats()["deferred_device_bytes"])
        raise torch.OutOfMemoryError("no device memory")

    backend.snapshot = fail  # type: ignore[method-assign, assignment]
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(torch.OutOfMemoryError):
        driver.save(None, {"codes": rows(0, 2)}, num_tokens_unpadded=2)
    assert seen == [2 * ROW_BYTES]
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0
    assert driver.cache.stats()["pages_held"] == 0


def test_W4_a_save_that_fails_after_its_clone_gives_its_bytes_back() -> None:
    """The step stays open; the save that is repeated reserves once."""
    driver = deferring()
    write_of = driver.cache._plane.write_of

    def fail_once(*_: object) -> list[object]:
        driver.cache._plane.write_of = write_of  # type: ignore[method-assign]
        raise MemoryError("late")

    driver.cache._plane.write_of = fail_once  # type: ignore[method-assign, assignment]
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(MemoryError, match="late"):
        driver.save(None, {"codes": rows(0, 2)}, num_tokens_unpadded=2)
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0
    driver.save(None, {"codes": rows(0, 2)}, num_tokens_unpadded=2)
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 2 * ROW_BYTES


def test_W4_a_save_waits_at_the_whole_budget_and_is_bounded() -> None:
    """The mover is stuck on a batch: the save closes what is open, waits, then gives up."""
    driver = deferring(device_staging_bytes_max=4 * ROW_BYTES, staging_claim_timeout_s=6)
    steps(driver, "a", 2, 0)
    driver.runtime.actors.clear()
    driver.start({"a": (2, 2)})
    step_id = driver.save(None, {"codes": rows(2, 2)}, num_tokens_unpadded=2)
    driver.cache.materialize(step_id)
    driver.start({"a": (4, 1)}, appended={"a": (1,)})
    with pytest.raises(WaitTimeoutError, match=r"8 B of device budget.*32, 32 B taken.*after 6 s"):
        driver.save(None, {"codes": rows(4, 1)}, num_tokens_unpadded=1)
    driver.settle()
    driver.cache.materialize(driver.save(None, {"codes": rows(4, 1)}, num_tokens_unpadded=1))
    assert driver.cache.stats()["device_budget_waits"] == 1


def test_W4_waiting_for_budget_closes_the_open_batch_first() -> None:
    """What fills the budget may be the open batch itself: it is closed and written first."""
    driver = deferring(device_staging_bytes_max=10 * ROW_BYTES)
    steps(driver, "a", 4, 0)
    assert closed(driver) == {}
    driver.run({"b": (0, 8)}, None, {"codes": rows(0, 8)}, new={"b": (0, (1, 2))})
    assert closed(driver) == {"budget": 2}
    assert driver.cache.stats()["device_bytes_high"] <= 10 * ROW_BYTES


def test_W4_a_step_larger_than_the_budget_is_admitted_alone_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Historical bug 15: never without a word."""
    caplog.set_level(logging.WARNING, logger="slotmirror.core")
    driver = deferring(device_staging_bytes_max=16)
    out = driver.run({"a": (0, 4)}, None, {"codes": rows(0, 4)}, new={"a": (0, (0,))})
    assert firsts(out.mm_outputs["codes"]["a"]) == [0, 1, 2, 3]
    assert "deferred rows take 32 B, device_staging_bytes_max is 16: admitted alone" in caplog.text
    driver.settle()
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0


def test_H4_an_older_owner_that_finishes_later_does_not_overwrite_the_newer_one() -> None:
    """A's row waits; B gets A's slot and is written; A's end must not bring A's row back."""
    driver = deferring()
    driver.run({"a": (0, 4)}, None, {"codes": rows(0, 4)}, new={"a": (0, (0,))})
    driver.run({"b": (0, 4)}, None, {"codes": rows(90, 4)}, new={"b": (0, (0,))})
    driver.start({}, ended=["b"])
    driver.start({}, ended=["a"])
    out = driver.run({"c": (4, 1)}, None, {}, new={"c": (4, (0, 1))})
    assert firsts(out.mm_outputs["codes"]["c"]) == [90, 91, 92, 93]
    assert driver.cache.stats()["deferred_rows_dead"] == 4


def test_H4_a_slot_lost_and_regained_keeps_the_fresh_row() -> None:
    """A loses its slot to B and gets it back: A's fresh rows win (historical bug 6)."""
    driver = deferring()
    driver.run({"a": (0, 4)}, None, {"codes": rows(0, 4)}, new={"a": (0, (0,))})
    driver.run({"b": (0, 4)}, None, {"codes": rows(50, 4)}, new={"b": (0, (0,))}, preempted=["a"])
    driver.run({"a": (0, 4)}, None, {"codes": rows(70, 4)}, ended=["b"], resumed={"a": (0, (0,))})
    out = driver.run({"c": (4, 1)}, None, {}, new={"c": (4, (0, 1))}, ended=["a"])
    assert firsts(out.mm_outputs["codes"]["c"]) == [70, 71, 72, 73]


def test_H4_a_claimed_slot_whose_step_omits_the_key_keeps_no_open_row() -> None:
    """The former owner's open row must not land behind the claim: the slot reads zeros."""
    driver = deferring()
    driver.run({"a": (0, 4)}, None, {"codes": rows(40, 4)}, new={"a": (0, (0,))})
    driver.run({"b": (0, 4)}, None, {"x": rows(1, 4)}, new={"b": (0, (0,))})
    driver.start({}, ended=["a"])
    driver.run({"d": (0, 1)}, None, {"codes": rows(5, 1)}, new={"d": (0, (3,))})
    out = driver.run(
        {"c": (4, 1)}, None, {"codes": rows(9, 1)}, new={"c": (4, (0, 1))}, ended=["b", "d"]
    )
    assert firsts(out.mm_outputs["codes"]["c"]) == [0, 0, 0, 0, 9]


def test_H4_an_open_row_does_not_come_back_over_one_that_was_written_at_once() -> None:
    """A's row waits on the device; B's, for the same slot, came on the host and is written."""

    class Moving(CpuRefBackend):
        on_device = True

        def owns(self, tensor: torch.Tensor) -> bool:
            return self.on_device

    backend = Moving()
    driver = deferring(backend=backend)
    driver.run({"a": (0, 4)}, None, {"codes": rows(0, 4)}, new={"a": (0, (0,))})
    backend.on_device = False
    driver.run({"b": (0, 4)}, None, {"codes": rows(90, 4)}, new={"b": (0, (0,))})
    driver.start({}, ended=["a"])
    out = driver.run({"c": (4, 1)}, None, {}, new={"c": (4, (0, 1))})
    assert firsts(out.mm_outputs["codes"]["c"]) == [90, 91, 92, 93]


@pytest.mark.parametrize("prefetch", [True, False])
def test_H6_a_hit_on_open_rows_closes_the_batch_and_reads_them(prefetch: bool) -> None:
    """The owner is still running; its rows are written, then gathered."""
    driver = deferring(prefetch=prefetch)
    driver.run({"a": (0, 5)}, None, {"codes": rows(0, 5)}, new={"a": (0, (0, 1))})
    out = driver.run({"b": (4, 1)}, None, {"codes": rows(9, 1)}, new={"b": (4, (0, 2))})
    assert firsts(out.mm_outputs["codes"]["b"]) == [0, 1, 2, 3, 9]
    assert closed(driver) == {"hit": 1}


def test_R1_reset_drops_the_open_batch_and_its_bytes() -> None:
    """Nothing of it is ever written."""
    driver = deferring()
    steps(driver, "a", 3, 0)
    driver.cache.reset()
    driver.settle()
    driver.cache.shutdown()
    assert driver.cache.stats()["rows_written"] == 0
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0


def test_W5_a_failed_deferred_write_releases_its_bytes_after_its_copies() -> None:
    """The pool write fails while the other buffer's copy runs: bytes return behind that copy."""
    backend = GatedBackend()
    driver = deferring(backend=backend, copy_chunk_bytes=2 * ROW_BYTES)
    driver.start({"a": (0, 6)}, new={"a": (0, (0, 1))})
    step_id = driver.save(None, {"codes": rows(0, 6)}, num_tokens_unpadded=6)
    backend.finish()
    driver.cache.materialize(step_id)
    waits: list[int] = []

    def one_copy_at_a_time(_timeout_s: float) -> None:
        waits.append(driver.cache.memory_stats()["deferred_device_bytes"])
        backend.finish(1)

    backend.on_wait = one_copy_at_a_time

    def fail(*_: object) -> None:
        raise OSError("pool gone")

    backend.scatter_slots = fail  # type: ignore[method-assign]
    driver.start({}, ended=["a"])
    driver.settle()
    assert waits == [6 * ROW_BYTES] * 2
    assert driver.cache.memory_stats()["deferred_device_bytes"] == 0
    with pytest.raises(CacheFailedError, match="pool gone"):
        driver.cache.reset()


def test_W2_the_models_buffer_may_be_overwritten_while_its_rows_wait() -> None:
    """Deferred rows are clones (D9), on a synchronous device too."""
    driver = deferring()
    buffer = rows(0, 4)
    driver.run({"a": (0, 4)}, None, {"codes": buffer}, new={"a": (0, (0,))})
    buffer.fill_(-1)
    out = driver.run({"b": (4, 1)}, None, {}, new={"b": (4, (0, 1))}, ended=["a"])
    assert firsts(out.mm_outputs["codes"]["b"]) == [0, 1, 2, 3]
