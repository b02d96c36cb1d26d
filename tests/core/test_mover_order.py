"""What the mover does in which order, and what it says of itself meanwhile."""

from __future__ import annotations

import logging

import pytest
import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.errors import WaitTimeoutError
from slotmirror.core.oplog import Mover, Operation
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, rows
from support.driven_runtime import UnstartedThread
from support.faults import begun
from support.gated_backend import GatedBackend


def gave_up(driver: Driver) -> str:
    """What a caller is told who does not want to wait at all."""
    with pytest.raises(WaitTimeoutError) as caught:
        driver.cache.quiesce(0)
    return str(caught.value)


def test_W6_a_report_says_whether_the_head_waits_for_the_device_or_moves_rows() -> None:
    """The wait for the device ends with it, not with the operation."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    reports: list[str] = []
    scatter = backend.scatter_slots

    def wait_and_finish(_timeout_s: float) -> None:
        reports.append(gave_up(driver))
        backend.finish()

    def report_and_scatter(*arguments: object) -> None:
        reports.append(gave_up(driver))
        scatter(*arguments)  # type: ignore[arg-type]

    backend.on_wait = wait_and_finish
    backend.scatter_slots = report_and_scatter  # type: ignore[method-assign]
    begun(driver)
    driver.settle()
    waiting, moving = reports
    assert "(write step 1: 4 rows of __hidden_states__; copying) is waiting for the dev" in waiting
    assert "(write step 1: 4 rows of __hidden_states__; host_ready) is moving rows" in moving


def test_W6_only_the_wait_for_the_device_has_the_longer_bound() -> None:
    """While the head moves rows, another thread's save gives up after the shorter one."""
    backend = GatedBackend()
    driver = Driver(
        backend=backend, staging_depth=1, staging_claim_timeout_s=2, device_wait_timeout_s=50
    )
    begun(driver)
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    bounds: list[str] = []

    def save_another(*_: object) -> None:
        with pytest.raises(WaitTimeoutError, match=r"a free staging page .* after 2 s"):
            driver.save(rows(0, 1))
        bounds.append("short")

    backend.on_wait = lambda _timeout_s: backend.finish()
    backend.scatter_slots = save_another  # type: ignore[method-assign]
    driver.cache._plane.committer.step()
    assert bounds == ["short"]


def test_H3_operations_appended_while_one_is_carried_out_inline_come_after_it() -> None:
    """A discard on another thread leaves its release to the thread that is moving rows."""

    class DiscardsInAWrite(CpuRefBackend):
        def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
            if len(rows) == 1:
                driver.cache.discard_step(earlier)
                held.append(driver.cache.stats()["pages_held"])
            super().scatter_slots(pool, slots, rows)

    held: list[object] = []
    driver = Driver(backend=DiscardsInAWrite(), committer="inline")
    earlier = begun(driver)
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    driver.save(rows(0, 1))
    assert held == [2]
    assert driver.cache.stats()["pages_held"] == 1
    assert driver.cache.stats()["log_length"] == 0


class _Noting(Operation):
    """Notes the log's length when it lets go of what it holds."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.lengths: list[object] = []

    def run(self, mover: Mover) -> None:
        pass

    def let_go(self) -> None:
        self.lengths.append(self.driver.cache.stats()["log_length"])

    def describe(self) -> str:
        return "a note"


def test_S3_an_operation_counts_as_done_once_it_has_let_go() -> None:
    """Whoever waits for a drained log, a shutdown for instance, finds nothing held."""
    driver = Driver()
    note = _Noting(driver)
    driver.cache._log.append([note])
    driver.cache.quiesce(1)
    assert note.lengths == [1]
    assert driver.cache.stats()["log_length"] == 0


def test_S3_the_mover_gives_up_on_the_device_once_a_shutdown_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stalled device keeps no thread: the fence wait ends, bounded, and the page is kept."""
    caplog.set_level(logging.CRITICAL, logger="slotmirror.core")
    backend = GatedBackend()
    driver = Driver(backend=backend, device_wait_timeout_s=5, staging_claim_timeout_s=1)
    begun(driver)
    waited: list[float] = []

    def stall(timeout_s: float) -> None:
        waited.append(timeout_s)
        driver.runtime.now_s += timeout_s
        assert sum(waited) < 50, "the mover waits for ever"

    backend.on_wait = stall
    driver.cache.shutdown()
    driver.settle()
    assert 5 <= sum(waited) < 7
    assert driver.cache.stats()["pages_stranded"] == 1
    assert driver.cache.stats()["log_length"] == 0


class _BusyThread(UnstartedThread):
    """The mover's thread, in a row movement that does not end."""

    def is_alive(self) -> bool:
        return True


def test_S3_a_pool_that_the_mover_may_still_write_is_not_freed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread has not ended in time: the shutdown returns, and leaves pool and pages alone."""
    caplog.set_level(logging.CRITICAL, logger="slotmirror.core")
    driver = Driver()
    driver.runtime.start_thread = lambda name, target: _BusyThread()  # type: ignore[method-assign]
    begun(driver)
    driver.runtime.actors.clear()
    before = driver.cache.memory_stats()
    driver.cache.shutdown()
    assert driver.cache.memory_stats()["pool_bytes"] == before["pool_bytes"] > 0
    assert driver.cache.memory_stats()["staging_bytes"] > 0


def test_T2_a_step_whose_rows_lie_on_the_host_waits_for_no_device() -> None:
    """Its page was used by a copy before; that copy's fence is none of its business."""

    class OwnsWide(GatedBackend):
        def owns(self, tensor: torch.Tensor) -> bool:
            return tensor.shape[-1] > 2

    backend = OwnsWide()
    policy = ModelCachePolicy(needs_full_hidden_states=False)
    driver = Driver(backend=backend, policy=policy, staging_depth=1)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    step_id = driver.save(None, {"wide": rows(0, 1, 3)}, num_tokens_unpadded=1)
    backend.finish()
    driver.cache.materialize(step_id)
    driver.settle()
    driver.start({"a": (1, 1)})
    step_id = driver.save(None, {"narrow": rows(7, 1)}, num_tokens_unpadded=1)
    backend.lost = RuntimeError("asked for the fence of a copy that is long over")
    out = driver.cache.materialize(step_id)
    assert out.mm_outputs["narrow"]["a"].tolist() == [[7, 7]]
