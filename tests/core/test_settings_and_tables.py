"""K: configuration, policy, block tables; M: memory."""

from __future__ import annotations

import gc
from dataclasses import fields

import numpy as np
import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.core.backend import Capabilities
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import (
    ConfigError,
    HostMemoryLimitError,
    StepStateError,
    UnknownRequestError,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.memory_plan import plan_memory
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, rows
from support.gated_backend import GatedBackend


def test_K1_defaults_are_the_documented_ones() -> None:
    """Every field of the spec, with its default."""
    config = PrefixCacheConfig(num_blocks=2, block_size=3)
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "num_blocks": 2,
        "block_size": 3,
        "device_staging_bytes_max": 512 << 20,
        "staging_depth": 4,
        "staging_capacity_tokens": 1024,
        "staging_claim_timeout_s": 30.0,
        "device_wait_timeout_s": 300.0,
        "copy_chunk_bytes": 16 << 20,
        "host_memory_limit_bytes": None,
        "hit_buffer_bytes_max": None,
        "pin_pool": False,
        "pin_outputs": False,
        "direct_capture_rows_min": None,
        "mover_threads": 1,
        "prefetch": True,
        "committer": "threaded",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("block_size", -1),
        ("staging_depth", 0),
        ("staging_depth", 2.5),
        ("staging_depth", True),
        ("staging_capacity_tokens", "many"),
        ("staging_claim_timeout_s", 0),
        ("device_wait_timeout_s", float("inf")),
        ("device_wait_timeout_s", "long"),
        ("copy_chunk_bytes", 0),
        ("device_staging_bytes_max", None),
        ("host_memory_limit_bytes", 0),
        ("hit_buffer_bytes_max", -5),
        ("pin_pool", 1),
        ("prefetch", None),
        ("mover_threads", 0),
        ("committer", "eager"),
    ],
)
def test_K1_wrong_values_raise_with_the_fields_name(field: str, value: object) -> None:
    """The error names field and value and says what would be right."""
    settings = {"num_blocks": 2, "block_size": 3} | {field: value}
    with pytest.raises(ConfigError, match=f"^{field}=.*must be") as caught:
        PrefixCacheConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert caught.value.value == value


def test_K1_direct_capture_needs_a_pinned_pool() -> None:
    """The device may copy only into page-locked memory."""
    with pytest.raises(ConfigError, match="direct_capture_rows_min=8: must be None unless pin_p"):
        PrefixCacheConfig(num_blocks=2, block_size=3, direct_capture_rows_min=8)
    PrefixCacheConfig(num_blocks=2, block_size=3, direct_capture_rows_min=8, pin_pool=True)


def test_K3_slots_follow_the_block_table_of_each_request() -> None:
    """Slot of p = table[p // block] × block + p % block; new, appended, replaced, dropped."""
    tables = BlockTables(num_blocks=32, block_size=4)
    events = tables.step(
        new=[AdmittedRequest("a", 0, (7, 2)), AdmittedRequest("b", 4, (7, 9))],
        num_scheduled_tokens={"b": 2, "a": 6},
        num_computed_tokens={"a": 0, "b": 4},
    )
    assert events.slots.tolist() == [36, 37, 28, 29, 30, 31, 8, 9]
    assert events.req_ids == ("b", "a")
    assert events.first_positions.tolist() == [4, 0]
    assert events.num_tokens.tolist() == [2, 6]
    events = tables.step(
        appended={"a": (11,)},
        preempted=["b"],
        num_scheduled_tokens={"a": 3},
        num_computed_tokens={"a": 6},
    )
    assert events.slots.tolist() == [10, 11, 44]
    events = tables.step(
        ended=["a"],
        resumed=[AdmittedRequest("b", 4, (1, 3))],
        num_scheduled_tokens={"b": 1},
        num_computed_tokens={"b": 4},
    )
    assert events.slots.tolist() == [12]
    assert len(tables) == 1


def test_K3_many_requests_and_long_tables_grow_the_mirror() -> None:
    """100 requests with 40 blocks each: every last slot is right, rows are reused after the end."""
    tables = BlockTables(num_blocks=8000, block_size=2)
    for _ in range(2):
        ids = [f"r{i}" for i in range(100)]
        events = tables.step(
            new=[AdmittedRequest(r, 0, range(40 * i, 40 * i + 40)) for i, r in enumerate(ids)],
            num_scheduled_tokens=dict.fromkeys(ids, 80),
            num_computed_tokens=dict.fromkeys(ids, 0),
        )
        assert events.slots.tolist() == list(range(8000))
        tables.step(ended=ids, num_scheduled_tokens={}, num_computed_tokens={})
        assert len(tables) == 0


def test_K3_a_missing_block_gives_slot_minus_one_and_unknown_requests_raise() -> None:
    """The mirror invents no slot; a refused step changes nothing."""
    tables = BlockTables(num_blocks=32, block_size=4)
    events = tables.step(
        new=[AdmittedRequest("a", 0, (3,))],
        num_scheduled_tokens={"a": 90},
        num_computed_tokens={"a": 0},
    )
    assert events.slots.tolist() == [12, 13, 14, 15] + [-1] * 86
    for unknown in ({"num_scheduled_tokens": {"z": 1}}, {"appended": {"z": (1,)}}):
        call = {"num_scheduled_tokens": {}, "num_computed_tokens": {"z": 0}} | unknown
        with pytest.raises(UnknownRequestError, match=r"\['z'\]"):
            tables.step(**call)  # type: ignore[arg-type]
    with pytest.raises(UnknownRequestError, match=r"\['a'\]"):
        tables.step(ended=["a"], num_scheduled_tokens={"a": 1}, num_computed_tokens={"a": 4})
    assert len(tables) == 1
    with pytest.raises(ConfigError, match="block_size=0"):
        BlockTables(num_blocks=1, block_size=0)


def test_K4_from_model_reads_the_three_attributes_or_their_defaults() -> None:
    """Missing attributes mean: hidden needed, nothing deferred, nothing written in sample."""

    class Talker:
        requires_full_prefix_cached_hidden_states = False
        deferred_prefix_cache_mm_keys = ("codes.audio",)
        mm_outputs_written_in_sample = True

    assert ModelCachePolicy.from_model(object()) == ModelCachePolicy()
    assert ModelCachePolicy.from_model(Talker()) == ModelCachePolicy(
        needs_full_hidden_states=False,
        deferred_keys=frozenset({"codes.audio"}),
        mm_outputs_written_in_sample=True,
    )


def test_K4_contradictory_policies_are_refused() -> None:
    """Each error names the field that contradicts another."""
    with pytest.raises(ConfigError, match=r"leftover_keys=\['x'\]"):
        ModelCachePolicy(deferred_keys=frozenset("x"), leftover_keys=frozenset("x"))
    with pytest.raises(ConfigError, match="hidden states are immediate"):
        ModelCachePolicy(deferred_keys=frozenset({HIDDEN_KEY}))
    with pytest.raises(ConfigError, match="mm_outputs_written_in_sample=True"):
        ModelCachePolicy(mm_outputs_written_in_sample=True)
    driver = Driver()
    with pytest.raises(StepStateError, match="make a new manager"):
        driver.cache.register_policy(ModelCachePolicy(needs_full_hidden_states=False))
    driver.cache.register_policy(ModelCachePolicy())


def test_K4_a_step_without_a_policy_is_refused() -> None:
    """The manager must know what the model needs before the first step."""
    driver = Driver()
    driver.cache._policy = None
    with pytest.raises(StepStateError, match="call register_policy before"):
        driver.start({"a": (0, 1)}, new={"a": (0, (0,))})


def test_M1_the_plan_reproduces_the_seeds_figures() -> None:
    """[15092, 16, 2048] bf16 is 0.92 GiB; [16180, 16, 16] int64 is 33.1 MB (and 31.6 MiB)."""
    thinker = PrefixCacheConfig(num_blocks=15092, block_size=16)
    plan = plan_memory(thinker, [KeySpec(HIDDEN_KEY, (2048,), torch.bfloat16)])
    assert plan.pool_bytes == 15092 * 16 * 2048 * 2
    assert round(plan.pool_bytes / 2**30, 2) == 0.92
    talker = PrefixCacheConfig(num_blocks=16180, block_size=16)
    plan = plan_memory(talker, [KeySpec("codes.audio", (16,), torch.int64)])
    assert round(plan.pool_bytes / 1e6, 1) == 33.1
    assert round(plan.pool_bytes / 2**20, 1) == 31.6


def test_M1_the_plan_is_what_is_then_held() -> None:
    """Pool and staging bytes of the plan equal those of the running cache."""
    driver = Driver(staging_depth=3, staging_capacity_tokens=10)
    keys = [KeySpec(HIDDEN_KEY, (5,), torch.float32), KeySpec("codes", (2, 3), torch.int8)]
    plan = driver.cache.preallocate(keys)
    assert plan.pool_bytes == 32 * (20 + 6)
    assert plan.staging_bytes == 3 * 10 * (20 + 6)
    assert plan.host_bytes == plan.pool_bytes + plan.staging_bytes
    held = driver.cache.memory_stats()
    assert (held["pool_bytes"], held["staging_bytes"]) == (plan.pool_bytes, plan.staging_bytes)
    deferred = plan_memory(driver.cache.config, keys, frozenset({"codes"}))
    assert deferred.bounce_bytes == 2 * driver.cache.config.copy_chunk_bytes
    assert deferred.deferred_clone_bytes_max == driver.cache.config.device_staging_bytes_max
    assert deferred.immediate_clone_bytes_max == 3 * 10 * 20


def test_M1_a_key_beyond_the_limit_is_refused_with_the_plan() -> None:
    """Nothing is allocated; the step goes on without the key."""
    driver = Driver(host_memory_limit_bytes=32 * 8 + 4 * 64 * 8, staging_depth=4)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(HostMemoryLimitError, match=r"big: \(100\) float32: pool 12,800 B"):
        driver.save(rows(0, 2), {"big": rows(0, 2, 100)})
    assert driver.cache.memory_stats()["pool_bytes"] == 0
    driver.cache.materialize(driver.save(rows(0, 2)))
    assert driver.cache.memory_stats()["pool_bytes"] == 32 * 8


@pytest.mark.parametrize("pin_pool", [False, True])
def test_M1_more_than_the_driver_can_page_lock_is_refused(pin_pool: bool) -> None:
    """Pages, bounce buffers and a pinned pool count; an ordinary pool does not."""

    class SmallDriver(GatedBackend):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(async_copy=False, pinned_host=True, max_pinned_bytes=4 * 64 * 8)

    driver = Driver(backend=SmallDriver(), pin_pool=pin_pool, staging_depth=4)
    hidden = KeySpec(HIDDEN_KEY, (2,), torch.float32)
    if pin_pool:
        with pytest.raises(HostMemoryLimitError, match=r"lock 2,048 B: .* or unset pin_pool"):
            driver.cache.preallocate([hidden])
        return
    driver.cache.preallocate([hidden])
    with pytest.raises(HostMemoryLimitError, match="lower staging_depth"):
        driver.cache.preallocate([KeySpec("more", (1,), torch.int8)])


def test_M2_after_preallocate_no_save_allocates_host_memory() -> None:
    """The first step of a preallocated key calls no allocator (historical bug 20)."""
    driver = Driver()
    driver.cache.preallocate(
        [KeySpec(HIDDEN_KEY, (2,), torch.float32), KeySpec("codes", (2,), torch.float32)]
    )
    before = driver.backend.calls.count("alloc_host")  # type: ignore[attr-defined]
    driver.run({"a": (0, 2)}, rows(0, 2), {"codes": rows(0, 2)}, new={"a": (0, (0,))})
    driver.settle()
    assert driver.backend.calls.count("alloc_host") == before  # type: ignore[attr-defined]


def test_M3_hit_buffers_are_bounded_when_planned_and_metered() -> None:
    """Beyond `hit_buffer_bytes_max` the step is refused; dropping outputs makes room."""
    driver = Driver(hit_buffer_bytes_max=100)
    driver.run({"a": (0, 8)}, rows(0, 8), new={"a": (0, (0, 1))})
    out = driver.run({"b": (8, 1)}, rows(9, 1), new={"b": (8, (0, 1, 2))})
    driver.settle()
    assert driver.cache.memory_stats()["hit_output_bytes"] == 72
    kept = out.hidden_states["b"][:1]  # type: ignore[index]
    del out
    refused = {"c": (8, (0, 1, 3))}
    with pytest.raises(HostMemoryLimitError, match="72 B are alive, hit_buffer_bytes_max is 100"):
        driver.start({"c": (8, 1)}, new=refused)
    assert driver.cache.stats()["hits"] == 1
    del kept
    gc.collect()
    out = driver.run({"c": (8, 1)}, rows(9, 1), new=refused)
    assert out.spans["c"] == (0, 9)
    assert driver.cache.stats()["hit_buffer_bytes_high"] == 72


def test_M3_output_buffers_are_recycled_when_their_last_tensor_dies() -> None:
    """The same memory serves again, never while a slice of it is alive."""
    driver = Driver(staging_capacity_tokens=4096, num_blocks=512, block_size=16)
    driver.start({"a": (0, 4096)}, new={"a": (0, range(256))})
    out = driver.cache.materialize(driver.save(rows(0, 4096, 8)))
    address = out.hidden_states["a"].data_ptr()  # type: ignore[index]
    kept = out.hidden_states["a"][4000:]  # type: ignore[index]
    del out
    driver.start({"b": (0, 4096)}, new={"b": (0, range(256, 512))}, ended=["a"])
    other = driver.cache.materialize(driver.save(rows(5, 4096, 8)))
    assert other.hidden_states["b"].data_ptr() != address  # type: ignore[index]
    assert float(kept[0, 0]) == 4000
    del kept
    gc.collect()
    driver.start({"c": (0, 4096)}, new={"c": (0, range(256))}, ended=["b"])
    third = driver.cache.materialize(driver.save(rows(7, 4096, 8)))
    assert third.hidden_states["c"].data_ptr() == address  # type: ignore[index]
    assert np.isclose(float(other.hidden_states["b"][0, 0]), 5)  # type: ignore[index]


def test_O1_stats_count_steps_rows_and_bytes_by_key() -> None:
    """One hit step: every counter that it moves, and the log is empty afterwards."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), {"codes": rows(0, 4, 4)}, new={"a": (0, (0,))})
    driver.run({"b": (4, 2)}, rows(9, 2), new={"b": (4, (0, 1))}, ended=["a"])
    driver.settle()
    stats = driver.cache.stats()
    expected = {
        "steps_started": 2,
        "steps_saved": 2,
        "steps_materialized": 2,
        "tokens_saved": 6,
        "hits": 1,
        "hit_tokens": 4,
        "rows_written": 10,
        "bytes_written": 4 * 8 + 4 * 16 + 2 * 8,
        "rows_gathered": 8,
        "bytes_gathered": 4 * 8 + 4 * 16,
        "operations_appended": 4,
        "operations_completed": 4,
        "log_length": 0,
        "pages_held": 0,
        "unconsumed_steps": [],
        "failures": 0,
        "pool_bytes_by_key": {HIDDEN_KEY: 32 * 8, "codes": 32 * 16},
    }
    assert {name: stats[name] for name in expected} == expected
    assert driver.cache.log_tail()[-1] == "4 write step 2: 2 rows of __hidden_states__"
