"""T: threads and locks, on real threads; P2 and T5 run in every other test through the driver."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.committer import SPLIT_BYTES_MIN, Committer
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import AdmittedRequest, StepEvents
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import OpLog
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.runtime import ThreadRuntime
from slotmirror.core.stats import CacheStats
from support.caches import Driver, firsts, rows
from support.driven_runtime import DrivenRuntime, LockCheckedBackend


def threaded(backend: CpuRefBackend | None = None, **settings: object) -> PrefixCacheManager:
    """A manager on real threads."""
    config = PrefixCacheConfig(num_blocks=64, block_size=4, **settings)  # type: ignore[arg-type]
    cache = PrefixCacheManager(config, backend or CpuRefBackend())
    cache.register_policy(ModelCachePolicy())
    return cache


def new_step(tables: BlockTables, name: str, block: int) -> StepEvents:
    """One new request with four tokens in one block."""
    return tables.step(
        new=[AdmittedRequest(name, 0, (block,))],
        num_scheduled_tokens={name: 4},
        num_computed_tokens={name: 0},
    )


def test_T1_the_engine_thread_never_waits_for_a_reader_or_a_writer() -> None:
    """The mover and the builder are stuck; starts and saves go through until pages run out."""
    driver = Driver(staging_depth=6)
    driver.runtime.actors.clear()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.save(rows(0, 4))
    for number in range(5):
        name = f"b{number}"
        driver.start({name: (4, 1)}, new={name: (4, (0, number + 1))})
        driver.save(rows(number, 1))
    assert driver.runtime.now_s == 0
    assert driver.cache.stats()["operations_completed"] == 0


def test_T2_a_builder_binds_its_thread_before_it_touches_the_device() -> None:
    """`bind_thread` is the first backend call of a materialize."""
    driver = Driver()
    assert isinstance(driver.backend, LockCheckedBackend)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    step_id = driver.save(rows(0, 1))
    driver.backend.calls.clear()
    driver.cache.materialize(step_id)
    assert driver.backend.calls[0] == "bind_thread"


def test_T2_an_inline_mover_binds_the_thread_that_it_runs_on() -> None:
    """A thread that only discards runs the mover inline: it is bound first (historical bug 19)."""
    driver = Driver(committer="inline")
    assert isinstance(driver.backend, LockCheckedBackend)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    step_id = driver.save(rows(0, 1))
    driver.backend.calls.clear()
    driver.cache.discard_step(step_id)
    assert driver.backend.calls[0] == "bind_thread"


def test_T3_the_mover_never_takes_the_managers_lock_and_needs_no_page() -> None:
    """It works while another thread holds that lock and every page is taken."""
    driver = Driver(staging_depth=1)
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.save(rows(0, 4))
    assert driver.cache.stats()["pages_held"] == 1
    taken: list[str] = []
    enter = type(driver.cache._tables.lock).__enter__

    def record(lock: object) -> object:
        taken.append(lock.name)  # type: ignore[attr-defined]
        return enter(lock)  # type: ignore[arg-type]

    type(driver.cache._tables.lock).__enter__ = record  # type: ignore[method-assign, assignment]
    try:
        driver.settle()
    finally:
        type(driver.cache._tables.lock).__enter__ = enter  # type: ignore[method-assign]
    assert driver.cache.stats()["rows_written"] == 4
    assert set(taken) <= {"log", "task"}


def test_T4_T5_P2_no_lock_is_held_across_a_backend_call_or_a_wait() -> None:
    """The checked backend sees every kind of call in one trace, and none of them under a lock."""
    driver = Driver(staging_depth=1)
    assert isinstance(driver.backend, LockCheckedBackend)
    driver.run({"a": (0, 4)}, rows(0, 4), {"x": torch.arange(9)}, new={"a": (0, (0,))})
    driver.run({"b": (4, 1)}, rows(9, 1), {"codes": rows(1, 1)}, new={"b": (4, (0, 1))})
    driver.settle()
    driver.cache.shutdown()
    assert driver.cache.stats()["page_waits"] == 1
    assert {
        "alloc_host",
        "copy_to_host",
        "current_stream",
        "gather_slots",
        "new_fence",
        "new_stream",
        "scatter_slots",
    } <= set(driver.backend.calls)


def test_T5_the_checked_locks_notice_a_violation() -> None:
    """A backend call under a lock, or a lock taken twice, fails the test that does it."""
    runtime = DrivenRuntime()
    backend = LockCheckedBackend(runtime)
    lock = runtime.lock("manager")
    with lock, pytest.raises(AssertionError, match=r"new_fence called under \['manager'\]"):
        backend.new_fence()
    with lock, pytest.raises(AssertionError, match="taken twice"):
        lock.__enter__()


def test_T5_inline_operations_run_outside_the_managers_lock() -> None:
    """Inline mode moves rows on the engine thread, with no lock held."""
    driver = Driver(committer="inline")
    out = driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    assert driver.cache.stats()["rows_written"] == 4
    assert out.spans["a"] == (0, 4)


def test_T7_threads_start_lazily_and_bind_their_device_first() -> None:
    """No thread before the first operation; the committer's first call is `bind_thread`."""
    calls: list[tuple[str, str]] = []

    class Noting(CpuRefBackend):
        def bind_thread(self, device: torch.device) -> None:
            calls.append(("bind", threading.current_thread().name))

        def scatter_slots(self, pool, slots, rows):  # type: ignore[no-untyped-def]
            calls.append(("scatter", threading.current_thread().name))
            super().scatter_slots(pool, slots, rows)

    cache = threaded(Noting())
    names = [thread.name for thread in threading.enumerate()]
    assert "slotmirror-committer" not in names
    cache.new_step_starts(new_step(BlockTables(num_blocks=64, block_size=4), "a", 0))
    cache.save_outputs(rows(0, 4), {}, num_tokens_unpadded=4)
    cache.quiesce(30)
    cache.shutdown()
    assert calls == [("bind", "slotmirror-committer"), ("scatter", "slotmirror-committer")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_T7_a_fork_before_first_use_is_safe() -> None:
    """A manager made in the parent serves in the child, whose threads start there."""
    script = """
import os, sys, torch
torch.set_num_threads(1)
from slotmirror import *
cache = PrefixCacheManager(PrefixCacheConfig(num_blocks=4, block_size=4), load_backend("cpu_ref"))
cache.register_policy(ModelCachePolicy())
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
tables = BlockTables(num_blocks=4, block_size=4)
cache.new_step_starts(tables.step(new=[AdmittedRequest("a", 0, (0,))],
    num_scheduled_tokens={"a": 2}, num_computed_tokens={"a": 0}))
out = cache.materialize(cache.save_outputs(torch.ones(2, 3), {}, num_tokens_unpadded=2))
cache.quiesce(20)
cache.shutdown()
os._exit(0 if out.hidden_states["a"].sum() == 6 else 5)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=100, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("committer", ["threaded", "inline"])
def test_builders_on_other_threads_deliver_every_row(committer: str) -> None:
    """200 steps, two builder threads, pages few: rows are right, threads end, pages come back."""
    cache = threaded(committer=committer, staging_depth=3, staging_capacity_tokens=8)
    tables = BlockTables(num_blocks=64, block_size=4)
    steps: queue.SimpleQueue[tuple[int, str, int] | None] = queue.SimpleQueue()
    wrong: list[object] = []

    def build() -> None:
        while (item := steps.get()) is not None:
            step_id, name, number = item
            out = cache.materialize(step_id)
            got = firsts(out.hidden_states[name])  # type: ignore[index]
            if got != [number, number + 1, number + 2, number + 3]:
                wrong.append((name, got))

    builders = [threading.Thread(target=build, name=f"slotmirror-test-{i}") for i in range(2)]
    for builder in builders:
        builder.start()
    for number in range(200):
        name = f"r{number}"
        events = tables.step(
            ended=[f"r{number - 1}"] if number else [],
            new=[AdmittedRequest(name, 0, (number % 64,))],
            num_scheduled_tokens={name: 4},
            num_computed_tokens={name: 0},
        )
        cache.new_step_starts(events)
        steps.put((cache.save_outputs(rows(number, 4), {}, num_tokens_unpadded=4), name, number))
    for _ in builders:
        steps.put(None)
    for builder in builders:
        builder.join(60)
    cache.quiesce(30)
    assert not wrong
    stats = cache.stats()
    assert stats["rows_written"] == 800
    assert stats["pages_held"] == 0
    cache.shutdown()


def test_mover_threads_split_a_large_gather_and_change_no_byte() -> None:
    """A hit of 24 MiB on three threads: the rows in order, helpers started late and joined."""
    threads: set[str] = set()
    all_three = threading.Barrier(3)

    class Noting(CpuRefBackend):
        def gather_slots(self, pool, slots, out):  # type: ignore[no-untyped-def]
            all_three.wait(60)  # no part begins before every thread has one
            threads.add(threading.current_thread().name)
            super().gather_slots(pool, slots, out)

    config = PrefixCacheConfig(
        num_blocks=200, block_size=16, staging_capacity_tokens=3200, mover_threads=3
    )
    cache = PrefixCacheManager(config, Noting())
    cache.register_policy(ModelCachePolicy())
    tables = BlockTables(num_blocks=200, block_size=16)
    hidden = torch.randn(3072, 2048)
    cache.new_step_starts(
        tables.step(
            new=[AdmittedRequest("a", 0, range(192))],
            num_scheduled_tokens={"a": 3072},
            num_computed_tokens={"a": 0},
        )
    )
    cache.discard_step(cache.save_outputs(hidden, {}, num_tokens_unpadded=3072))
    cache.quiesce(60)
    assert not threads
    cache.new_step_starts(
        tables.step(
            new=[AdmittedRequest("b", 3072, range(193))],
            num_scheduled_tokens={"b": 1},
            num_computed_tokens={"b": 3072},
        )
    )
    out = cache.materialize(cache.save_outputs(hidden[:1], {}, num_tokens_unpadded=1))
    assert out.hidden_states is not None
    assert torch.equal(out.hidden_states["b"], torch.cat([hidden, hidden[:1]]))
    assert threads == {"slotmirror-committer", *(f"slotmirror-mover-helper-{i}" for i in (0, 1))}
    cache.shutdown()


def test_a_failing_helper_fails_the_gather_after_all_parts_have_ended() -> None:
    """One helper's part raises: the step's gather fails, nobody writes to its buffer any more."""

    class Failing(CpuRefBackend):
        def gather_slots(self, pool, slots, out):  # type: ignore[no-untyped-def]
            if threading.current_thread().name.startswith("slotmirror"):
                raise OSError("torn")
            super().gather_slots(pool, slots, out)

    pool = np.zeros(4, dtype="V1024")
    slots = np.zeros(2 * SPLIT_BYTES_MIN // 1024, dtype=np.int64)
    config = PrefixCacheConfig(num_blocks=1, block_size=1, mover_threads=2)
    mover = Committer(OpLog(config, ThreadRuntime(), CacheStats()), Failing(), config)
    with pytest.raises(OSError, match="torn"):
        mover.gather(pool, slots, np.empty(len(slots), "V1024"))
    assert not [t for t in threading.enumerate() if t.name.startswith("slotmirror-mover-helper")]


def test_an_interrupt_of_the_mover_is_not_lost_to_a_helper_that_failed_before() -> None:
    """Inline it is the engine's interrupt: the failure of a part must not take its place."""

    class Failing(CpuRefBackend):
        def gather_slots(self, pool, slots, out):  # type: ignore[no-untyped-def]
            if threading.current_thread().name.startswith("slotmirror"):
                raise OSError("torn")
            for thread in threading.enumerate():
                if thread.name.startswith("slotmirror-mover-helper"):
                    thread.join()
            raise KeyboardInterrupt

    pool = np.zeros(4, dtype="V1024")
    slots = np.zeros(2 * SPLIT_BYTES_MIN // 1024, dtype=np.int64)
    config = PrefixCacheConfig(num_blocks=1, block_size=1, mover_threads=2, committer="inline")
    mover = Committer(OpLog(config, ThreadRuntime(), CacheStats()), Failing(), config)
    with pytest.raises(KeyboardInterrupt):
        mover.gather(pool, slots, np.empty(len(slots), "V1024"))


def test_the_thread_runtime_refuses_foreign_locks() -> None:
    """A condition belongs to a lock of its own runtime."""
    with pytest.raises(TypeError, match="not made by this runtime"):
        ThreadRuntime().condition(DrivenRuntime().lock("log"))
