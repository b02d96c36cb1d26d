"""G1-G4, K2, D10: which stages may have a cache, and of what size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.adapters.gate import StageFacts, StageKind, stage_prefix_cache_config
from slotmirror.adapters.stand_in import StepRowsOnly
from slotmirror.core.errors import (
    CacheShutDownError,
    ConfigError,
    PrefixCacheUnmatchError,
    StepStateError,
    UnknownStepError,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.policy import ModelCachePolicy
from support.caches import firsts, rows

PLAIN = StageFacts(enable_prefix_caching=True, num_blocks=100, block_size=16)


@pytest.mark.parametrize(
    "facts",
    [
        replace(PLAIN, enable_prefix_caching=False),
        replace(PLAIN, enable_prefix_caching=False, kv_role="kv_consumer"),
        replace(PLAIN, kind=StageKind.POOLING),
        replace(PLAIN, kind=StageKind.DIFFUSION, kv_groups=()),
    ],
)
def test_G1_stages_without_a_cache_get_none(facts: StageFacts) -> None:
    """Off, pooling and diffusion: no cache, whatever else is set."""
    assert stage_prefix_cache_config(facts) is None


@pytest.mark.parametrize("kind", [StageKind.AUTOREGRESSIVE, StageKind.CODEC_DECODER])
def test_G1_stages_that_have_one(kind: StageKind) -> None:
    """Codec decoders are allowed, though pointless."""
    assert stage_prefix_cache_config(replace(PLAIN, kind=kind)) is not None


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"kv_role": "kv_consumer"}, "kv_role='kv_consumer'"),
        ({"kv_role": "kv_both"}, "kv_role='kv_both'"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill=True"),
        ({"kv_groups": ("full_attention", "sliding_window")}, "kv_groups"),
        ({"kv_groups": ("sliding_window",)}, "only full attention"),
        ({"hit_unit_tokens": 8}, "hit_unit_tokens=8"),
        ({"kernel_block_size": 24}, "kernel_block_size=24"),
        ({"kernel_block_size": 32}, "kernel_block_size=32"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"speculative_decoding": True}, "speculative_decoding=True"),
        (
            {"speculative_decoding": True, "verified_positions": True, "async_scheduling": True},
            "async_scheduling=True",
        ),
        (
            {"scheduling_policy": "priority", "leaves_uncomputed_hashes": True},
            "scheduling_policy='priority'",
        ),
    ],
)
def test_G2_G4_what_cannot_be_mirrored_is_refused_by_name(
    change: dict[str, object], setting: str
) -> None:
    """`PrefixCacheUnmatchError` names the setting and says what to change it to."""
    with pytest.raises(PrefixCacheUnmatchError, match=setting) as caught:
        stage_prefix_cache_config(replace(PLAIN, **change))  # type: ignore[arg-type]
    assert caught.value.field in change


@pytest.mark.parametrize(
    "change",
    [
        {"kv_role": "kv_producer"},
        {"kernel_block_size": 8},
        {"hit_unit_tokens": 32},
        {"async_scheduling": True},
        {"speculative_decoding": True, "verified_positions": True},
        {"scheduling_policy": "priority"},
        {"tensor_parallel_size": 4},
        {"merged_rows_on_all_ranks": True},
    ],
)
def test_G2_what_can_be_mirrored_is_served(change: dict[str, object]) -> None:
    """Producers, smaller kernel blocks, synchronous drafts, priority without stale hashes …"""
    assert stage_prefix_cache_config(replace(PLAIN, **change)) is not None  # type: ignore[arg-type]


def test_G2_a_kernel_block_split_keeps_every_slot() -> None:
    """Block b of 16 is kernel blocks 2b and 2b + 1 of 8: the slot numbers are the same."""
    allocator = BlockTables(num_blocks=100, block_size=16)
    kernel = BlockTables(num_blocks=200, block_size=8)
    scheduled = {"num_scheduled_tokens": {"a": 40}, "num_computed_tokens": {"a": 0}}
    blocks = (7, 3, 90)
    halves = [half for block in blocks for half in (2 * block, 2 * block + 1)]
    one = allocator.step(new=[AdmittedRequest("a", 0, blocks)], **scheduled)
    other = kernel.step(new=[AdmittedRequest("a", 0, halves)], **scheduled)
    assert one.slots.tolist() == other.slots.tolist()


def test_G3_merged_rows_on_all_ranks_are_refused_with_tensor_parallelism() -> None:
    """Rows are kept on one rank."""
    facts = replace(PLAIN, tensor_parallel_size=2, merged_rows_on_all_ranks=True)
    with pytest.raises(PrefixCacheUnmatchError, match="tensor_parallel_size=2"):
        stage_prefix_cache_config(facts)


def test_K2_sizes_come_from_the_engine_and_every_field_from_outside() -> None:
    """Capacity: batched tokens, else model length, else the default; depth: batches + 2."""
    config = stage_prefix_cache_config(
        replace(PLAIN, max_num_batched_tokens=8192, max_model_len=4096, max_concurrent_batches=4)
    )
    assert config is not None
    assert (config.num_blocks, config.block_size) == (100, 16)
    assert (config.staging_capacity_tokens, config.staging_depth) == (8192, 6)
    config = stage_prefix_cache_config(replace(PLAIN, max_model_len=4096))
    assert config is not None
    assert (config.staging_capacity_tokens, config.staging_depth) == (4096, 4)
    config = stage_prefix_cache_config(PLAIN)
    assert config is not None
    assert config.staging_capacity_tokens == 1024
    settings = {"staging_depth": 9, "prefetch": False, "staging_capacity_tokens": 77}
    config = stage_prefix_cache_config(replace(PLAIN, settings=settings))
    assert config is not None
    assert {name: getattr(config, name) for name in settings} == settings
    with pytest.raises(ConfigError, match=r"stagingdepth=9: unknown; settings are .*block_size"):
        stage_prefix_cache_config(replace(PLAIN, settings={"stagingdepth": 9}))
    with pytest.raises(ConfigError, match="staging_depth=0"):
        stage_prefix_cache_config(replace(PLAIN, settings={"staging_depth": 0}))


def test_D10_outputs_written_in_sample_exclude_hidden_rows() -> None:
    """Refused when the policy is made, before it can be registered."""
    with pytest.raises(ConfigError, match="mm_outputs_written_in_sample"):
        ModelCachePolicy(needs_full_hidden_states=True, mm_outputs_written_in_sample=True)
    ModelCachePolicy(needs_full_hidden_states=False, mm_outputs_written_in_sample=True)


def test_G3_the_stand_in_of_other_ranks_returns_this_steps_rows() -> None:
    """A hit's step delivers its own rows; ids, orders and shutdown behave as the manager's."""
    cache = StepRowsOnly(ModelCachePolicy())
    tables = BlockTables(num_blocks=8, block_size=4)
    with pytest.raises(StepStateError, match="without an open step"):
        cache.save_outputs(rows(0, 1), {}, num_tokens_unpadded=1)
    cache.new_step_starts(
        tables.step(
            new=[AdmittedRequest("a", 4, (0, 1)), AdmittedRequest("b", 0, (2,))],
            num_scheduled_tokens={"a": 2, "b": 1},
            num_computed_tokens={"a": 4, "b": 0},
        )
    )
    hidden, ref = rows(0, 3), torch.arange(5)
    step_id = cache.save_outputs(
        hidden, {"ref": [ref], "codes": rows(7, 3)}, num_tokens_unpadded=3, req_ids=["b", "a"]
    )
    hidden.fill_(-1)
    ref.fill_(-1)
    out = cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [1, 2]
    assert firsts(out.mm_outputs["codes"]["b"]) == [7]
    assert out.mm_outputs["ref"]["a"][0].tolist() == [0, 1, 2, 3, 4]
    assert dict(out.spans) == {"a": (4, 6), "b": (0, 1)}
    with pytest.raises(UnknownStepError, match="already consumed"):
        cache.discard_step(step_id)
    cache.reset()
    cache.shutdown()
    cache.shutdown()
    with pytest.raises(CacheShutDownError):
        cache.materialize(step_id)
