"""Failures in awkward places: half-opened keys, repeated saves, racing shutdowns, odd threads."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.backend import HostBuffer
from slotmirror.core.buffers import OutputBuffers
from slotmirror.core.errors import (
    CacheShutDownError,
    HitSpanError,
    KeyLayoutError,
    RowLayoutError,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.driven_runtime import LockCheckedBackend
from support.gated_backend import GatedBackend

NO_HIDDEN = ModelCachePolicy(needs_full_hidden_states=False)


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_D8_a_key_that_could_not_be_opened_may_come_back_with_another_layout(failing: int) -> None:
    """Pool or page memory fails half-way: nothing of the first layout is left behind."""
    driver = Driver(policy=NO_HIDDEN, staging_depth=3)
    allocate = driver.backend.alloc_host
    made: list[HostBuffer] = []

    def refuse(shape, dtype, *, pinned):  # type: ignore[no-untyped-def]
        if len(made) == failing - 1:
            driver.backend.alloc_host = allocate  # type: ignore[method-assign]
            raise MemoryError("no host memory")
        made.append(allocate(shape, dtype, pinned=pinned))
        return made[-1]

    driver.backend.alloc_host = refuse  # type: ignore[method-assign]
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(MemoryError):
        driver.save(None, {"codes": rows(0, 4, 1)}, num_tokens_unpadded=4)
    assert driver.cache.memory_stats()["pool_bytes"] == 0
    assert driver.cache.memory_stats()["staging_bytes"] == 0
    assert [buffer.reserved_bytes for buffer in made] == [0] * (failing - 1)
    driver.cache.materialize(driver.save(None, {"codes": rows(1, 4, 3)}, num_tokens_unpadded=4))
    out = driver.run({"b": (4, 1)}, None, {}, new={"b": (4, (0, 1))})
    assert torch.equal(out.mm_outputs["codes"]["b"], rows(1, 4, 3))


def test_C3_a_save_that_failed_late_may_be_repeated_in_another_row_order() -> None:
    """The second order counts: a later hit reads every row from its slot."""
    driver = Driver()
    new = {"a": (0, (0,)), "b": (0, (1,))}
    driver.start({"a": (0, 4), "b": (0, 4)}, new=new)
    write_of = driver.cache._plane.write_of

    def fail_once(*_: object) -> list[object]:
        driver.cache._plane.write_of = write_of  # type: ignore[method-assign]
        raise MemoryError("late")

    driver.cache._plane.write_of = fail_once  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError, match="late"):
        driver.save(rows(0, 8), req_ids=["b", "a"])
    driver.settle()
    assert driver.cache.stats()["pages_held"] == 0
    driver.cache.materialize(driver.save(rows(0, 8), req_ids=["a", "b"]))
    out = driver.run({"c": (4, 1)}, rows(9, 1), new={"c": (4, (1, 2))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [4, 5, 6, 7, 9]


def test_D6_a_key_that_is_none_this_time_is_simply_omitted() -> None:
    """Its hit rows are delivered; before the key was ever seen None is an ordinary leftover."""
    driver = Driver()
    first = driver.run({"a": (0, 4)}, rows(0, 4), {"codes": None}, new={"a": (0, (0,))})
    assert first.mm_outputs["codes"]["a"] is None
    driver.run({"a": (4, 4)}, rows(4, 4), {"codes": rows(50, 4)}, appended={"a": (1,)})
    out = driver.run({"b": (8, 1)}, rows(8, 1), {"codes": None}, new={"b": (8, (0, 1, 2))})
    assert firsts(out.mm_outputs["codes"]["b"]) == [0, 0, 0, 0, 50, 51, 52, 53]
    driver.start({"c": (8, 1)}, new={"c": (8, (0, 1, 3))})
    with pytest.raises(KeyLayoutError, match=r"keys \['codes'\] have hit rows to deliver"):
        driver.save(rows(8, 1), {"codes": ["text"]})
    driver.cache.materialize(driver.save(rows(8, 1)))


def test_D7_leftovers_that_are_empty_tensors_only_are_delivered() -> None:
    """Nothing to copy, yet the structure has tensors; the device is not asked to."""
    driver = Driver(policy=NO_HIDDEN)
    assert isinstance(driver.backend, LockCheckedBackend)
    out = driver.run({"a": (0, 1)}, None, {"x": torch.empty(0)}, new={"a": (0, (0,))})
    assert out.mm_outputs["x"]["a"].shape == (0,)
    assert "copy_to_host" not in driver.backend.calls


def test_D9_tensors_inside_a_dataclass_are_copied_too() -> None:
    """A model's own output class: its fields survive the next forward."""

    @dataclass(frozen=True)
    class Codes:
        values: torch.Tensor
        name: str

    driver = Driver(policy=NO_HIDDEN)
    values = torch.arange(5)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    step_id = driver.save(None, {"x": Codes(values, "n")}, num_tokens_unpadded=1)
    values.fill_(-1)
    received = driver.cache.materialize(step_id).mm_outputs["x"]["a"]
    assert isinstance(received, Codes)
    assert received.values.tolist() == [0, 1, 2, 3, 4]
    assert received.name == "n"


def test_T7_a_thread_that_cannot_be_started_changes_nothing() -> None:
    """The step is started again later, and its hit is still a hit."""
    driver = Driver()
    driver.run({"old": (0, 4)}, rows(0, 4), new={"old": (0, (0,))})
    driver.settle()
    driver.cache._plane.committer._thread = None
    start = driver.runtime.start_thread

    def refuse(*_: object) -> None:
        driver.runtime.start_thread = start  # type: ignore[method-assign]
        raise RuntimeError("can't start new thread")

    driver.runtime.start_thread = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="can't start"):
        driver.start({"a": (4, 1)}, new={"a": (4, (0, 1))})
    out = driver.run({"a": (4, 1)}, rows(4, 1), new={"a": (4, (0, 1))})
    assert out.spans["a"] == (0, 5)


def test_S3_a_step_that_starts_while_a_shutdown_begins_is_refused() -> None:
    """Nothing is opened, and nothing appended to a log that nobody reads any more."""
    driver = Driver()
    start = driver.runtime.start_thread

    def shut_down_meanwhile(*arguments: Any) -> Any:
        driver.cache.shutdown()
        return start(*arguments)

    driver.runtime.start_thread = shut_down_meanwhile  # type: ignore[method-assign]
    with pytest.raises(CacheShutDownError):
        driver.start({"a": (4, 1)}, new={"a": (4, (0, 1))})
    assert driver.cache.stats()["steps_started"] == 0
    assert driver.cache.stats()["log_length"] == 0


def test_L2_rows_that_were_delivered_already_are_not_missed() -> None:
    """A replay over a slot that lost its row, below what was delivered meanwhile: no error."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0, 1))})
    first = driver.save(rows(0, 4))
    driver.start({"x": (0, 1)}, new={"x": (0, (0,))}, preempted=["a"])  # never saved: slot 0 absent
    driver.start({"a": (4, 1)}, resumed={"a": (4, (0, 1))})
    replay = driver.save(rows(4, 1))
    driver.cache.materialize(first)
    assert driver.cache.materialize(replay).spans["a"] == (4, 5)


def test_S3_a_save_that_waits_for_a_page_when_shutdown_comes_is_refused() -> None:
    """It gets `CacheShutDownError`, its page and bytes come back, nothing hangs."""
    driver = Driver(staging_depth=1)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    driver.save(rows(0, 1))
    driver.settle()
    shut_downs = iter([driver.cache.shutdown])

    def shut_down_meanwhile() -> bool:
        call = next(shut_downs, None)
        if call is not None:
            driver.cache._tables.engine_busy = False  # as seen from a thread of its own
            call()
        return call is not None

    driver.runtime.actors.insert(0, shut_down_meanwhile)
    driver.start({"b": (0, 1)}, new={"b": (0, (1,))})
    with pytest.raises(CacheShutDownError):
        driver.save(rows(0, 1))


def test_S3_a_save_that_commits_after_shutdown_began_gives_everything_back() -> None:
    """The copy had been launched: the page is released behind it, the caller is told."""
    driver = Driver()
    stage = driver.cache._plane.ring.stage

    def close_after_staging(*args, **kwargs):  # type: ignore[no-untyped-def]
        staged = stage(*args, **kwargs)
        driver.cache._tables.closed = True
        return staged

    driver.cache._plane.ring.stage = close_after_staging  # type: ignore[method-assign]
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    with pytest.raises(CacheShutDownError):
        driver.save(rows(0, 1))
    driver.settle()
    assert driver.cache._plane.ring.pages_held == 0
    assert driver.cache._tables.open_step is None


def test_S3_an_inline_shutdown_with_a_stalled_device_is_bounded() -> None:
    """The mover runs on the caller's thread and must give up with it."""
    backend = GatedBackend()
    driver = Driver(backend=backend, committer="inline", device_wait_timeout_s=5)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})

    def pass_time(timeout_s: float) -> None:
        driver.runtime.now_s += timeout_s
        if driver.runtime.now_s > 50:
            raise AssertionError("waited far beyond the bound")
        if driver.cache._plane.committer._abandon_at == math.inf and driver.runtime.now_s >= 2:
            driver.cache._plane.committer.abandon_after(5)  # as a shutdown does

    backend.on_wait = pass_time
    driver.save(rows(0, 1))
    driver.cache.shutdown()
    assert driver.runtime.now_s < 20
    stats = driver.cache.stats()
    assert (stats["pages_held"], stats["pages_stranded"]) == (0, 1)


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    """Engines save under `torch.inference_mode()`; the first save allocates, later ones differ."""
    driver = Driver()
    with torch.inference_mode():
        driver.run({"a": (0, 4)}, rows(0, 4), {"x": [torch.arange(3)]}, new={"a": (0, (0,))})
    driver.settle()
    out = driver.run({"b": (4, 1)}, rows(9, 1), {"x": [torch.arange(2)]}, new={"b": (4, (0, 1))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 9]


@pytest.mark.parametrize("member", ["current_stream", "new_stream"])
def test_W5_what_fails_before_a_launch_is_not_sticky(member: str) -> None:
    """No copy was launched: the page comes back and the save may be repeated."""
    driver = Driver()
    original = getattr(driver.backend, member)

    def fail() -> None:
        setattr(driver.backend, member, original)
        raise OSError("no stream")

    setattr(driver.backend, member, fail)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(OSError, match="no stream"):
        driver.save(rows(0, 2))
    assert driver.cache.stats()["pages_held"] == 0
    assert driver.cache.materialize(driver.save(rows(0, 2))).spans["a"] == (0, 2)


def test_M3_a_lease_that_could_not_be_had_is_not_charged() -> None:
    """And reading the meter from another thread loses nothing."""

    class NoMemory(CpuRefBackend):
        def alloc_host(self, shape, dtype, *, pinned):  # type: ignore[no-untyped-def]
            raise MemoryError

    buffers = OutputBuffers(NoMemory(), 100)
    with pytest.raises(MemoryError):
        buffers.lease(1 << 20, for_hits=True)
    assert buffers.hit_bytes_alive == 0
    leases = [buffers.lease(10, for_hits=True) for _ in range(5)]
    reader = threading.Thread(target=lambda: [buffers.hit_bytes_alive for _ in range(200)])
    reader.start()
    del leases
    reader.join()
    gc.collect()
    assert buffers.hit_bytes_alive == 0
    buffers.check_hits(100)


def test_M3_idle_memory_is_bounded_by_size() -> None:
    """Large buffers are kept in small numbers, and none after the end."""
    buffers = OutputBuffers()
    size = 1 << 26
    leases = [buffers.lease(size) for _ in range(8)]
    del leases
    gc.collect()
    assert buffers.idle_bytes == 4 * size


def test_D8_M2_layouts_that_cannot_be_kept_are_refused_when_preallocated() -> None:
    """One name with two layouts, rows without bytes; hidden gets advice that it can follow."""
    driver = Driver()
    two = [KeySpec("x", (2,), torch.int8), KeySpec("x", (3,), torch.int8)]
    with pytest.raises(KeyLayoutError, match=r"x: \(3\) int8.*opened with x: \(2\) int8"):
        driver.cache.preallocate(two)
    with pytest.raises(KeyLayoutError, match="rows without bytes"):
        driver.cache.preallocate([KeySpec("x", (0,), torch.int8)])
    driver.cache.preallocate([KeySpec(HIDDEN_KEY, (2,), torch.float32)])
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    with pytest.raises(KeyLayoutError) as caught:
        driver.save(rows(0, 1, 3))
    assert "leftover_keys" not in str(caught.value)


def test_K3_a_step_without_a_first_position_changes_nothing() -> None:
    """Named before the tables change."""
    tables = BlockTables(num_blocks=8, block_size=4)
    with pytest.raises(RowLayoutError, match=r"without an entry in num_computed_tokens: \['a'\]"):
        tables.step(num_scheduled_tokens={"a": 1}, num_computed_tokens={})
    assert len(tables) == 0


def test_D4_a_new_request_without_a_hit_begins_at_zero() -> None:
    """It computed nothing and hit nothing, so it cannot begin behind its first token."""
    driver = Driver()
    with pytest.raises(HitSpanError, match="hit of 0 tokens: its first scheduled position is 4"):
        driver.start({"a": (4, 1)}, new={"a": (0, (0, 1))})


def test_S4_arrays_that_are_not_int64_are_refused_by_name() -> None:
    """A step whose slots are 32-bit numbers is refused with the dtypes; nothing has changed."""
    driver = Driver()
    events = driver.tables.step(
        new=[AdmittedRequest("a", 0, (0,))],
        num_scheduled_tokens={"a": 2},
        num_computed_tokens={"a": 0},
    )
    narrow = replace(events, slots=events.slots.astype(np.int32))
    with pytest.raises(RowLayoutError, match="slots int32: all must be int64"):
        driver.cache.new_step_starts(narrow)
    driver.cache.new_step_starts(events)
    assert firsts(driver.cache.materialize(driver.save(rows(0, 2))).hidden_states["a"]) == [0, 1]


def test_memory_that_comes_back_after_the_close_is_freed_at_once() -> None:
    """Also while another output of its size is still alive."""
    buffers = OutputBuffers()
    kept, dropped = buffers.lease(1 << 20), buffers.lease(1 << 20)
    memory = weakref.ref(dropped.base.obj)  # type: ignore[union-attr]  # a memoryview of the array
    buffers.close()
    del dropped
    gc.collect()
    assert memory() is None
    assert len(kept) == 1 << 20
