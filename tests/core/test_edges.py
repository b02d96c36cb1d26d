"""What breaks only at the edges: leaks over many requests, odd values, checks of every input."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.backend import Capabilities
from slotmirror.core.buffers import OutputBuffers, rows_tensor, rows_view
from slotmirror.core.errors import (
    CacheFailedError,
    EngineDivergenceError,
    HitSpanError,
    HostMemoryLimitError,
    ReplayOrderError,
    RowLayoutError,
    without_tracebacks,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.gated_backend import GatedBackend

NO_HIDDEN = ModelCachePolicy(needs_full_hidden_states=False)


def test_D7_a_named_leftover_is_never_cached() -> None:
    """A later hit does not deliver it, and it has no pool."""
    policy = ModelCachePolicy(leftover_keys=frozenset({"named"}))
    driver = Driver(policy=policy)
    driver.run({"a": (0, 4)}, rows(0, 4), {"named": rows(40, 4)}, new={"a": (0, (0,))})
    out = driver.run({"b": (4, 1)}, rows(9, 1), {}, new={"b": (4, (0, 1))})
    assert out.mm_outputs == {}
    assert list(driver.cache.stats()["pool_bytes_by_key"]) == ["__hidden_states__"]  # type: ignore[call-overload]


def test_D7_leftovers_of_every_kind_come_back_as_they_were() -> None:
    """Arrays are copied, named tuples keep their type, odd sizes and empty tensors survive."""
    pair = namedtuple("pair", "left right")
    array = np.arange(3)
    odd = {
        "mixed": [
            torch.ones(3, dtype=torch.int8),
            torch.arange(2),
            torch.ones(1, dtype=torch.bool),
        ],
        "named": pair(torch.ones(2), 5),
        "array": array,
        "empty": torch.empty(0, 4),
    }
    driver = Driver(policy=NO_HIDDEN)
    driver.start({"a": (0, 1)}, new={"a": (0, (0,))})
    step_id = driver.save(None, odd, num_tokens_unpadded=1)
    array[:] = -1
    out = driver.cache.materialize(step_id).mm_outputs
    assert [t.tolist() for t in out["mixed"]["a"]] == [[1, 1, 1], [0, 1], [True]]
    assert type(out["named"]["a"]) is pair
    assert out["named"]["a"].right == 5
    assert out["array"]["a"].tolist() == [0, 1, 2]
    assert out["empty"]["a"].shape == (0, 4)


def test_D9_a_pages_arena_grows_with_its_leftovers() -> None:
    """One page, ever larger leftovers: each step gets its own."""
    driver = Driver(policy=NO_HIDDEN, staging_depth=1)
    for number, size in enumerate((3, 500, 20, 4000)):
        name = f"r{number}"
        out = driver.run({name: (0, 1)}, None, {"x": torch.arange(size)}, new={name: (0, (0,))})
        assert out.mm_outputs["x"][name].tolist() == list(range(size))


def test_tensors_that_are_not_the_devices_are_copied_at_once() -> None:
    """A host tensor of a device model: rows and leftovers arrive without the device's help."""

    class OwnsOnlyHidden(CpuRefBackend):
        def owns(self, tensor: torch.Tensor) -> bool:
            return tensor.dim() == 2 and tensor.shape[1] == 2

    driver = Driver(backend=OwnsOnlyHidden())
    mm = {"codes": rows(5, 4, 3), "ref": [torch.arange(3)]}
    driver.run({"a": (0, 4)}, rows(0, 4), mm, new={"a": (0, (0,))})
    out = driver.run({"b": (4, 1)}, rows(9, 1), {}, new={"b": (4, (0, 1))})
    assert firsts(out.mm_outputs["codes"]["b"]) == [5, 6, 7, 8]


def test_rows_of_owners_are_reused_however_their_steps_end() -> None:
    """300 requests, materialized, discarded or abandoned in turn: the registry does not grow."""
    driver = Driver()
    for number in range(300):
        name = f"r{number}"
        ended = [f"r{number - 1}"] if number else []
        driver.start({name: (0, 2)}, new={name: (0, (number % 8,))}, ended=ended)
        if number % 3:
            step_id = driver.save(rows(0, 2))
            consume = driver.cache.materialize if number % 3 == 1 else driver.cache.discard_step
            consume(step_id)
    assert len(driver.cache._tables.registry._saved_end) == 16
    assert len(driver.cache._tables.registry._row_of) == 1


def test_L1_a_new_owner_does_not_inherit_a_preemption() -> None:
    """Preempted, ended, and the id comes back: its next `new` is a continuation, not a resume."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), new={"a": (0, (0,))})
    driver.start({}, preempted=["a"])
    driver.start({}, ended=["a"])
    driver.run({"a": (0, 3)}, rows(50, 3), new={"a": (0, (1,))})
    out = driver.run({"a": (3, 2)}, rows(53, 2), new={"a": (3, (1, 2))})
    assert out.spans["a"] == (3, 5)


def test_D4_a_hit_that_does_not_end_where_the_step_begins_is_refused() -> None:
    """The hit's length and the first scheduled position must meet; so must hit and schedule."""
    driver = Driver()
    driver.run({"a": (0, 8)}, rows(0, 8), new={"a": (0, (0, 1))})
    with pytest.raises(HitSpanError, match="first scheduled position is 8, not the end of the hit"):
        driver.start({"b": (8, 1)}, new={"b": (4, (0, 1, 2))})
    with pytest.raises(HitSpanError, match="a hit of a request that is not scheduled"):
        driver.start({}, new={"c": (4, (0, 1))})


def test_S4_events_whose_arrays_do_not_fit_are_refused_one_by_one() -> None:
    """Counts, positions, slots and their number; each error says which."""
    driver = Driver()
    good = driver.tables.step(
        new=[AdmittedRequest("a", 0, (0,)), AdmittedRequest("b", 0, (1,))],
        num_scheduled_tokens={"a": 2, "b": 1},
        num_computed_tokens={"a": 0, "b": 0},
    )
    two = np.array([2, 1], dtype=np.int64)
    for change, message in (
        ({"num_tokens": two[:1]}, "2 scheduled requests, but 1 token counts and 2 first positions"),
        ({"first_positions": two[:0]}, "2 token counts and 0 first positions"),
        ({"num_tokens": two - 1}, r"requests \['b'\] are scheduled with no token"),
        ({"first_positions": two - 2}, r"requests \['b'\] are scheduled.*negative position"),
        ({"slots": good.slots[:2]}, "3 scheduled tokens, but 2 slots"),
        ({"slots": good.slots + 28}, r"requests \['b'\] write slots \[32\] outside 0..31"),
        ({"slots": good.slots + 40}, r"requests \['a', 'b'\] write slots \[40, 41, 44\] outside"),
    ):
        with pytest.raises(RowLayoutError, match=message):
            driver.cache.new_step_starts(replace(good, **change))  # type: ignore[arg-type]
    driver.cache.new_step_starts(good)


def test_M1_M3_limits_count_all_keys_together() -> None:
    """Each key alone would fit; both do not."""
    limit = 32 * 8 + 4 * 64 * 8
    driver = Driver(policy=NO_HIDDEN, host_memory_limit_bytes=limit + 100)
    driver.run({"a": (0, 2)}, None, {"one": rows(0, 2)}, new={"a": (0, (0,))})
    driver.start({"a": (2, 1)})
    with pytest.raises(HostMemoryLimitError):
        driver.save(None, {"two": rows(0, 1)}, num_tokens_unpadded=1)
    driver = Driver(policy=NO_HIDDEN, hit_buffer_bytes_max=60)
    driver.run({"a": (0, 4)}, None, {"one": rows(0, 4), "two": rows(0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(HostMemoryLimitError, match="need 80 B"):
        driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))})


@pytest.mark.parametrize("pin_pool", [True, False])
def test_pages_are_pinned_where_the_device_can_and_the_pool_where_asked(pin_pool: bool) -> None:
    """What the backend is asked to page-lock."""
    asked: list[tuple[int, bool]] = []

    class Pinning(CpuRefBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(async_copy=False, pinned_host=True)

        def alloc_host(self, shape, dtype, *, pinned):  # type: ignore[no-untyped-def]
            asked.append((shape[0], pinned))
            return super().alloc_host(shape, dtype, pinned=pinned)

    driver = Driver(backend=Pinning(), pin_pool=pin_pool, staging_depth=2)
    driver.run({"a": (0, 1)}, rows(0, 1), {"x": [torch.arange(4)]}, new={"a": (0, (0,))})
    assert asked == [(32, pin_pool), (64, True), (64, True), (128, True)]


def test_K3_a_reused_row_of_the_mirror_keeps_no_block() -> None:
    """A later request in the same row: a block it lacks is missing, not its predecessor's."""
    tables = BlockTables(num_blocks=32, block_size=4)
    call = {"num_scheduled_tokens": {"a": 8}, "num_computed_tokens": {"a": 0}}
    tables.step(new=[AdmittedRequest("a", 0, (3, 4))], **call)
    again = tables.step(ended=["a"], new=[AdmittedRequest("a", 0, (9,))], **call)
    assert again.slots.tolist() == [36, 37, 38, 39, -1, -1, -1, -1]


def test_K3_the_same_ids_in_other_rows_get_their_own_slots() -> None:
    """Ids that swap rows between steps are looked up again."""
    tables = BlockTables(num_blocks=32, block_size=4)
    call = {"num_scheduled_tokens": {"a": 1, "b": 1}, "num_computed_tokens": {"a": 0, "b": 0}}
    one = [AdmittedRequest("a", 0, (1,)), AdmittedRequest("b", 0, (2,))]
    assert tables.step(new=one, **call).slots.tolist() == [4, 8]
    other = [AdmittedRequest("b", 0, (3,)), AdmittedRequest("a", 0, (4,))]
    assert tables.step(ended=["a", "b"], new=other, **call).slots.tolist() == [16, 12]


def test_L3_a_replay_waits_for_an_earlier_step_that_is_being_consumed() -> None:
    """Consumed means finished: while the earlier call waits for the device, the replay raises."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    first = driver.save(rows(0, 4))
    driver.start({"a": (4, 1)}, preempted=["a"], resumed={"a": (4, (0, 1))})
    replay = driver.save(rows(4, 1))
    refused: list[ReplayOrderError] = []

    def ask_for_the_replay(_timeout_s: float) -> None:
        with pytest.raises(ReplayOrderError) as caught:
            driver.cache.materialize(replay)
        refused.append(caught.value)
        backend.finish()

    backend.on_wait = ask_for_the_replay
    driver.cache.materialize(first)
    assert refused[0].earlier == (first,)


def test_every_view_of_a_lease_keeps_its_memory() -> None:
    """Tensors, opaque rows and slices of them: the memory is idle only when all are gone."""
    buffers = OutputBuffers()
    spec = KeySpec("x", (4,), torch.bfloat16)
    lease = buffers.lease(1 << 20)
    views = [
        rows_tensor(lease, spec)[3:5].float,
        rows_view(lease, spec)[1:],
        lease[8:16].view("V8"),
    ]
    del lease
    while views:
        gc.collect()
        assert buffers.idle_bytes == 0
        views.pop()
    gc.collect()
    assert buffers.idle_bytes == 1 << 20
    late = buffers.lease(1 << 20)
    buffers.close()
    del late
    gc.collect()
    assert buffers.idle_bytes == 0


def test_W5_clones_are_freed_as_soon_as_their_copy_has_run() -> None:
    """Not when the step is consumed: device memory is the scarcer one."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    clones: list[weakref.ref[torch.Tensor]] = []
    snapshot = backend.snapshot

    def watched(tensors):  # type: ignore[no-untyped-def]
        made = snapshot(tensors)
        clones.extend(weakref.ref(clone) for clone in made)
        return made

    backend.snapshot = watched  # type: ignore[method-assign]
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    driver.save(rows(0, 2))
    backend.finish()
    gc.collect()
    assert clones[0]() is not None
    driver.settle()
    gc.collect()
    assert clones[0]() is None


def test_W5_the_first_failure_stays_the_first() -> None:
    """A later one is counted nowhere and named nowhere."""
    driver = Driver()
    driver.cache._log.poison(OSError("first"), "one")
    driver.cache._log.poison(OSError("second"), "two")
    with pytest.raises(CacheFailedError, match="first"):
        driver.cache.reset()
    assert driver.cache.stats()["failures"] == 1


def test_kept_errors_lose_the_tracebacks_of_their_whole_chain() -> None:
    """Causes and contexts too, and a chain that bites its tail ends."""
    try:
        try:
            raise OSError("inner")
        except OSError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        outer = without_tracebacks(error)
    assert outer.__traceback__ is None
    assert outer.__cause__ is not None
    assert outer.__cause__.__traceback__ is None
    outer.__cause__.__cause__ = outer
    without_tracebacks(outer)


def test_T4_the_tables_are_touched_under_the_manager_lock_alone() -> None:
    """Every call into registry, slot table, open batch and unconsumed steps of a whole trace."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"codes"}))
    driver = Driver(policy=policy)
    cache = driver.cache
    bare: list[str] = []

    def guard(owner: object, name: str) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def guarded(*args: object, **kwargs: object) -> object:
            if "manager" not in driver.runtime.held:
                bare.append(name)
            return method(*args, **kwargs)

        setattr(owner, name, guarded)

    tables = cache._tables
    for owner, names in (
        (
            tables.registry,
            "plan apply replays note_saved note_delivered delivered_ends",
        ),
        (tables.slots, "plan_hits claim mark_written clear widen"),
        (tables.deferred, "reason_to_close kill add close"),
        (tables.steps, "add begin finish take take_idle drop"),
    ):
        for name in names.split():
            guard(owner, name)
    new = {"new": {"a": (0, (0,))}}
    wide = {
        name: rows(9, 4) for name in ("codes", *"vwxyz")
    }  # more than the first table has room for
    driver.run({"a": (0, 4)}, rows(0, 4), wide, **new)
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))}, ended=["a"])
    cache.discard_step(driver.save(rows(4, 1)))
    with pytest.raises(EngineDivergenceError):
        driver.start({"b": (5, 1)}, preempted=["b"])
    cache.reset()
    cache.shutdown()
    assert bare == []
