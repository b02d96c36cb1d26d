"""The gate over vLLM's own configuration objects; no engine is started (G1, G2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from slotmirror.adapters.gate import stage_prefix_cache_config
from slotmirror.adapters.vllm.stage_facts import refuse_without_cache, stage_facts
from slotmirror.core.errors import PrefixCacheUnmatchError

_ROWS = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def _group(spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)


def _kv_cache(*specs: Any, **more: Any) -> KVCacheConfig:
    groups = [_group(spec) for spec in specs or (FullAttentionSpec(**_ROWS),)]
    return KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups, **more)


def _verdict(
    folder: Path, kv_cache: Any = None, kernel: int | None = None, **arguments: Any
) -> Any:
    """ "off", the refused setting, or the sizes."""
    change: Callable[[Any], None] | None = arguments.pop("change", None)
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        **{"enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 384} | arguments,
    ).create_engine_config()
    if change is not None:
        change(config)
    try:
        facts = stage_facts(
            config, kv_cache or _kv_cache(), kernel_block_size=kernel, cache_settings={}
        )
        cache = stage_prefix_cache_config(facts)
        if cache is None:
            refuse_without_cache(facts)
            return "off"
    except PrefixCacheUnmatchError as refusal:
        return refusal.field
    return [cache.num_blocks, cache.block_size, cache.staging_capacity_tokens, cache.staging_depth]


def _set(path: str, value: Any) -> Callable[[Any], None]:
    """For what this platform's own checks would not let through."""

    def change(config: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            config = getattr(config, owner)
        object.__setattr__(config, name, value)

    return change


def gate(folder: Path) -> dict[str, Any]:
    """Every refusal of G2, and what is not refused."""
    sliding = SlidingWindowSpec(**_ROWS, sliding_window=64)
    mla = MLAAttentionSpec(**(_ROWS | {"num_kv_heads": 1}))
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    return {
        "plain": _verdict(folder),
        "caching off": _verdict(folder, enable_prefix_caching=False),
        "async": _verdict(folder, async_scheduling=True),
        "kernel splits": _verdict(folder, kernel=16),
        "latent attention": _verdict(folder, _kv_cache(mla)),
        "priority": _verdict(folder, scheduling_policy="priority"),
        "kernel does not divide": _verdict(folder, kernel=12),
        "two groups": _verdict(folder, _kv_cache(FullAttentionSpec(**_ROWS), sliding)),
        "sliding window": _verdict(folder, _kv_cache(sliding)),
        "hits below a block": _hits_below_a_block(folder),
        "drafts": _verdict(folder, speculative_config=ngram, async_scheduling=False),
        "drafts and async": _verdict(
            folder,
            speculative_config=ngram,
            async_scheduling=False,
            change=_set("scheduler_config.async_scheduling", True),
        ),
        "drafts on device": _verdict(
            folder,
            speculative_config=ngram,
            async_scheduling=False,
            change=_set("speculative_config.method", "ngram_gpu"),
        ),
        "consumer": _verdict(folder, kv_transfer_config=_transfer("kv_consumer")),
        "both": _verdict(folder, kv_transfer_config=_transfer("kv_both")),
        "producer": _verdict(folder, kv_transfer_config=_transfer("kv_producer")),
        "decode context": _verdict(
            folder, change=_set("parallel_config.decode_context_parallel_size", 2)
        ),
        "prefill context": _verdict(
            folder, change=_set("parallel_config.prefill_context_parallel_size", 2)
        ),
        "fast prefill": _verdict(folder, kv_sharing_fast_prefill=True),
        "fast prefill, caching off": _verdict(
            folder, kv_sharing_fast_prefill=True, enable_prefix_caching=False
        ),
        "pooling": _verdict(folder, runner="pooling"),
    }


def _hits_below_a_block(folder: Path) -> Any:
    """In the engine's own field: 0.32 resolves the unit into the KV cache's configuration."""
    if "cache_hit_alignment_tokens" in {entry.name for entry in fields(KVCacheConfig)}:
        return _verdict(folder, _kv_cache(cache_hit_alignment_tokens=16))
    return _verdict(folder, change=_set("cache_config.prefix_match_unit", 16))


def _transfer(role: str) -> dict[str, str]:
    return {"kv_connector": "ExampleConnector", "kv_role": role}
