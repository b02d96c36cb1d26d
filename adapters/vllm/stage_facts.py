"""The gate's facts, read from vLLM's own configuration objects (G1-G4).

Read by attribute: the same names hold from vLLM 0.25 to 0.32; what a version lacks is the plain
case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotmirror.adapters.gate import StageFacts, StageKind
from slotmirror.core.errors import PrefixCacheUnmatchError


def stage_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    kernel_block_size: int | None,
    cache_settings: Mapping[str, object],
) -> StageFacts:
    """Facts about this stage.

    Takes a `VllmConfig`, the worker's `KVCacheConfig` and the block size of its attention kernel
    (None: the allocator's). Raises `PrefixCacheUnmatchError` for what has no place among the facts.
    """
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    _refuse_prefill_context_parallel(parallel)
    speculative = getattr(vllm_config, "speculative_config", None)
    _refuse_drafts_on_device(speculative)
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    asynchronous = bool(getattr(scheduler, "async_scheduling", False))
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    block_size = groups[0].block_size if groups else cache.block_size
    return StageFacts(
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        num_blocks=kv_cache_config.num_blocks,
        block_size=block_size,
        kind=_kind(vllm_config.model_config),
        kernel_block_size=kernel_block_size,
        hit_unit_tokens=_hit_unit(kv_cache_config, cache, block_size),
        kv_groups=tuple(attention_of(spec) for spec in groups),
        kv_role=getattr(transfer, "kv_role", None),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        max_concurrent_batches=parallel.pipeline_parallel_size + int(asynchronous),
        scheduling_policy=str(scheduler.policy),
        leaves_uncomputed_hashes=True,
        async_scheduling=asynchronous,
        speculative_decoding=speculative is not None,
        verified_positions=True,
        decode_context_parallel_size=getattr(parallel, "decode_context_parallel_size", 1),
        kv_sharing_fast_prefill=bool(getattr(cache, "kv_sharing_fast_prefill", False)),
        tensor_parallel_size=parallel.tensor_parallel_size,
        settings=cache_settings,
    )


def refuse_without_cache(facts: StageFacts) -> None:
    """What cannot be served even where prefix caching is off: the rows themselves are not right."""
    if facts.kv_sharing_fast_prefill:
        raise PrefixCacheUnmatchError(
            "kv_sharing_fast_prefill", True, "rows of the prompt are not computed: switch it off"
        )
    if facts.speculative_decoding and facts.async_scheduling:
        raise PrefixCacheUnmatchError(
            "async_scheduling",
            True,
            "with speculative decoding the engine's positions are optimistic: switch one off",
        )


def _kind(model_config: Any) -> StageKind:
    pooling = getattr(model_config, "runner_type", "generate") == "pooling"
    return StageKind.POOLING if pooling else StageKind.AUTOREGRESSIVE


def attention_of(spec: Any) -> str:
    """ "full_attention" for vLLM's `FullAttentionSpec` and what derives from it, else the class."""
    inner = getattr(spec, "kv_cache_specs", None)
    if isinstance(inner, Mapping) and inner:
        kinds = {attention_of(one) for one in inner.values()}
        return kinds.pop() if len(kinds) == 1 else type(spec).__name__
    names = {base.__name__ for base in type(spec).__mro__}
    return "full_attention" if "FullAttentionSpec" in names else type(spec).__name__


def _hit_unit(kv_cache_config: Any, cache_config: Any, block_size: int) -> int:
    """Tokens at which hits land: vLLM resolves it, finer than a block only if asked to be."""
    for source in (kv_cache_config, cache_config):
        unit = getattr(source, "cache_hit_alignment_tokens", None)
        if unit is not None:
            return int(unit)
    unit = getattr(cache_config, "prefix_match_unit", None)
    return block_size if unit is None else int(unit)


def _refuse_prefill_context_parallel(parallel_config: Any) -> None:
    size = getattr(parallel_config, "prefill_context_parallel_size", 1)
    if size != 1:
        raise PrefixCacheUnmatchError(
            "prefill_context_parallel_size", size, "tokens are striped over ranks: set it to 1"
        )


def _refuse_drafts_on_device(speculative_config: Any) -> None:
    method = getattr(speculative_config, "method", None)
    if method == "ngram_gpu":
        raise PrefixCacheUnmatchError(
            "speculative_config.method",
            method,
            "the runner trims drafts on the device, unseen by the scheduler: use 'ngram'",
        )
