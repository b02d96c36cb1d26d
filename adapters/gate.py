"""May this stage have a cache, and of what size: one function over plain values (G1-G4, K2).

Every engine's adapter fills in `StageFacts` from its own configuration objects; the rules stand
here once, for every engine and platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import ConfigError, PrefixCacheUnmatchError


class StageKind(Enum):
    """What a stage computes. Codec decoders are allowed, though nothing downstream needs them."""

    AUTOREGRESSIVE = "autoregressive"
    CODEC_DECODER = "codec decoder"
    POOLING = "pooling"
    DIFFUSION = "diffusion"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What an adapter knows of its stage; defaults are the plain case.

    num_blocks, block_size        of the engine's KV pool
    kernel_block_size             of the attention kernel; None: the same as block_size
    hit_unit_tokens               smallest prefix hit; None: a block
    kv_groups                     attention type of each KV-cache group
    kv_role                       "kv_producer", "kv_consumer", "kv_both" or None
    leaves_uncomputed_hashes      the engine may leave hashes on blocks that it never computed when
                                  priority preempts a request in the call that scheduled it
    verified_positions            the adapter reports which drafts were accepted (L7)
    merged_rows_on_all_ranks      the policy needs merged rows on every rank
    settings                      fields of `PrefixCacheConfig` set by the operator; they win
    """

    enable_prefix_caching: bool
    num_blocks: int
    block_size: int
    kind: StageKind = StageKind.AUTOREGRESSIVE
    kernel_block_size: int | None = None
    hit_unit_tokens: int | None = None
    kv_groups: tuple[str, ...] = ("full_attention",)
    kv_role: str | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrent_batches: int = 1
    scheduling_policy: str = "fcfs"
    leaves_uncomputed_hashes: bool = False
    async_scheduling: bool = False
    speculative_decoding: bool = False
    verified_positions: bool = False
    decode_context_parallel_size: int = 1
    kv_sharing_fast_prefill: bool = False
    tensor_parallel_size: int = 1
    merged_rows_on_all_ranks: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)


def stage_prefix_cache_config(facts: StageFacts) -> PrefixCacheConfig | None:
    """The cache's configuration, or None for a stage that has none (G1).

    Raises `PrefixCacheUnmatchError`, naming the setting to change, for a stage that asks for
    prefix caching in a way that the cache cannot mirror (G2, G3), and `ConfigError` for a setting
    of the operator that is unknown or wrong.
    """
    if not facts.enable_prefix_caching or facts.kind in (StageKind.POOLING, StageKind.DIFFUSION):
        return None
    for refusal in (_refuse_kv_source, _refuse_layout, _refuse_scheduling, _refuse_ranks):
        refusal(facts)
    return _sized(facts)


def _refuse_kv_source(facts: StageFacts) -> None:
    if facts.kv_role in ("kv_consumer", "kv_both"):
        raise PrefixCacheUnmatchError(
            "kv_role",
            facts.kv_role,
            "KV received from a producer is reported as computed tokens and cannot be told from a "
            "local hit: set enable_prefix_caching=False on this stage, or kv_role='kv_producer'",
        )
    if facts.kv_sharing_fast_prefill:
        raise PrefixCacheUnmatchError(
            "kv_sharing_fast_prefill",
            True,
            "rows of the prompt are not computed: switch it off, or prefix caching",
        )


def _refuse_layout(facts: StageFacts) -> None:
    if len(facts.kv_groups) != 1:
        raise PrefixCacheUnmatchError(
            "kv_groups",
            facts.kv_groups,
            "exactly one KV-cache group is mirrored: set enable_prefix_caching=False",
        )
    if facts.kv_groups[0] != "full_attention":
        raise PrefixCacheUnmatchError(
            "kv_groups",
            facts.kv_groups,
            "only full attention keeps a block for every position: set enable_prefix_caching=False",
        )
    unit = facts.block_size if facts.hit_unit_tokens is None else facts.hit_unit_tokens
    if unit % facts.block_size:
        raise PrefixCacheUnmatchError(
            "hit_unit_tokens",
            unit,
            f"hits must be whole blocks of {facts.block_size} tokens: set it to a multiple",
        )
    kernel = facts.block_size if facts.kernel_block_size is None else facts.kernel_block_size
    # An allocator block that is whole kernel blocks keeps its slots: block b becomes kernel blocks
    # b·k … b·k + k - 1, and slot b·block_size + i is the same slot in both tables.
    if kernel < 1 or facts.block_size % kernel:
        raise PrefixCacheUnmatchError(
            "kernel_block_size",
            kernel,
            f"does not divide block_size ({facts.block_size}), so slots cannot be translated "
            "exactly: choose a block size that is a multiple of the kernel's",
        )
    if facts.decode_context_parallel_size != 1:
        raise PrefixCacheUnmatchError(
            "decode_context_parallel_size",
            facts.decode_context_parallel_size,
            "tokens are striped over ranks: set it to 1, or switch prefix caching off",
        )


def _refuse_scheduling(facts: StageFacts) -> None:
    if facts.speculative_decoding and facts.async_scheduling:
        raise PrefixCacheUnmatchError(
            "async_scheduling",
            True,
            "with speculative decoding the engine's positions are optimistic during the forward: "
            "switch asynchronous scheduling or speculative decoding off",
        )
    if facts.speculative_decoding and not facts.verified_positions:
        raise PrefixCacheUnmatchError(
            "speculative_decoding",
            True,
            "this engine's adapter does not report which drafts were accepted: switch it off",
        )
    if facts.scheduling_policy == "priority" and facts.leaves_uncomputed_hashes:
        raise PrefixCacheUnmatchError(
            "scheduling_policy",
            "priority",
            "this engine leaves hashes on blocks that it never computed when priority preempts a "
            "request in the call that scheduled it: set the policy to 'fcfs'",
        )


def _refuse_ranks(facts: StageFacts) -> None:
    if facts.tensor_parallel_size > 1 and facts.merged_rows_on_all_ranks:
        raise PrefixCacheUnmatchError(
            "tensor_parallel_size",
            facts.tensor_parallel_size,
            "rows are kept on one rank, and the policy needs merged rows on all: set it to 1, or "
            "change the model's policy",
        )


def _sized(facts: StageFacts) -> PrefixCacheConfig:
    """Capacity and depth from the engine, every field open to the operator (K2)."""
    known = {entry.name for entry in fields(PrefixCacheConfig)}
    for name in facts.settings:
        if name not in known:
            raise ConfigError(
                name, facts.settings[name], f"unknown; settings are {', '.join(sorted(known))}"
            )
    sized: dict[str, object] = {
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "staging_depth": max(4, facts.max_concurrent_batches + 2),
    }
    capacity = facts.max_num_batched_tokens or facts.max_model_len
    if capacity:
        sized["staging_capacity_tokens"] = capacity
    return PrefixCacheConfig(**{**sized, **facts.settings})  # type: ignore[arg-type]
