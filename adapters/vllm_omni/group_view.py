"""The gate and the batch's order, under vLLM-Omni's names."""

from __future__ import annotations

from typing import Any

import torch

from slotmirror.adapters.gate import StageFacts, StageKind
from slotmirror.adapters.gate import stage_prefix_cache_config as core_gate
from slotmirror.adapters.vllm.stage_facts import attention_of
from slotmirror.adapters.vllm_omni.interface import (
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
)
from slotmirror.core.errors import PrefixCacheUnmatchError


class FullAttentionGroupView:
    """The order of requests in the runner's rows; all else comes from the scheduler's output.

    Raises `OmniPrefixCacheUnmatchError` for a block table whose slots cannot be translated.
    """

    def __init__(self, input_batch: Any, block_size: int) -> None:
        self._input_batch = input_batch
        self.block_size = block_size
        table = input_batch.block_table[0]
        kernel = block_size // int(getattr(table, "blocks_per_kv_block", 1))
        context_parallel = int(getattr(table, "dcp_world_size", 1))
        _gate(
            StageFacts(
                enable_prefix_caching=True,
                num_blocks=1,
                block_size=int(getattr(table, "kv_cache_block_size", block_size)),
                hit_unit_tokens=block_size,
                kernel_block_size=kernel,
                decode_context_parallel_size=context_parallel,
            )
        )

    @property
    def device(self) -> torch.device | None:
        """Where the stage computes, as its batch says."""
        device = getattr(self._input_batch, "device", None)
        return device if isinstance(device, torch.device) else None

    def batch_req_ids(self) -> list[str]:
        """Requests in the order of their rows."""
        return list(self._input_batch.req_ids)

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: dict[str, int]) -> torch.Tensor:
        """Slots of the scheduled tokens from the runner's own block table, (tokens,) int64.

        For comparison: the drop-in rebuilds its tables from the scheduler's output (K3).
        """
        batch, size = self._input_batch, self.block_size
        table = batch.block_table[0].block_table.cpu
        parts = [torch.empty(0, dtype=torch.long)]
        for req_id in req_ids:
            row = batch.req_id_to_index[req_id]
            first = int(batch.num_computed_tokens_cpu[row])
            positions = torch.arange(first, first + num_scheduled.get(req_id, 0))
            positions = positions[positions < table.shape[1] * size]
            parts.append(table[row, positions // size].long() * size + positions % size)
        return torch.cat(parts)


def check_prefix_cache_kv_groups(kv_cache_groups: object) -> None:
    """Raise unless there is one KV group, of full attention."""
    groups: list[Any] = list(kv_cache_groups or ())  # type: ignore[call-overload]
    kinds = tuple(attention_of(group.kv_cache_spec) for group in groups)
    _gate(StageFacts(enable_prefix_caching=True, num_blocks=1, block_size=1, kv_groups=kinds))


def check_prefix_cache_kv_transfer(kv_transfer_config: object) -> None:
    """Raise for a stage that receives KV."""
    if getattr(kv_transfer_config, "is_kv_consumer", False):
        role = getattr(kv_transfer_config, "kv_role", None) or "kv_consumer"
        _gate(StageFacts(enable_prefix_caching=True, num_blocks=1, block_size=1, kv_role=role))


def stage_prefix_cache_config(
    *,
    kv_cache_config: Any,
    cache_config: Any,
    kv_transfer_config: Any,
    scheduler_config: Any,
    model_config: Any,
    is_pooling_model: bool,
    speculative_config: Any = None,
) -> PrefixCacheConfig | None:
    """The stage's sizes, or None for a stage without a cache (G1).

    Raises `OmniPrefixCacheUnmatchError`, naming the setting to change, for what cannot be
    mirrored (G2); slotmirror's rules, among them priority scheduling.
    """
    if is_pooling_model or not getattr(cache_config, "enable_prefix_caching", False):
        return None
    check_prefix_cache_kv_transfer(kv_transfer_config)
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    check_prefix_cache_kv_groups(groups)
    unit = getattr(cache_config, "prefix_match_unit", None)
    _gate(
        StageFacts(
            enable_prefix_caching=True,
            kind=StageKind.AUTOREGRESSIVE,
            num_blocks=kv_cache_config.num_blocks,
            block_size=cache_config.block_size,
            hit_unit_tokens=None if unit is None else int(unit),
            scheduling_policy=str(getattr(scheduler_config, "policy", "fcfs")),
            leaves_uncomputed_hashes=True,
            async_scheduling=bool(getattr(scheduler_config, "async_scheduling", False)),
            speculative_decoding=speculative_config is not None,
            kv_sharing_fast_prefill=bool(getattr(cache_config, "kv_sharing_fast_prefill", False)),
        )
    )
    return PrefixCacheConfig.from_vllm_config(
        num_blocks=kv_cache_config.num_blocks,
        block_size=cache_config.block_size,
        scheduler_config=scheduler_config,
        model_config=model_config,
    )


def get_prefix_cache_group_view(
    input_batch: Any, block_size: int, kv_cache_groups: object = None
) -> FullAttentionGroupView | None:
    """The view of a batch; None where the batch has no block table."""
    check_prefix_cache_kv_groups(kv_cache_groups)
    if not getattr(input_batch.block_table, "block_tables", None):
        return None
    return FullAttentionGroupView(input_batch, block_size)


def _gate(facts: StageFacts) -> None:
    """slotmirror's one gate; its refusals under the name that callers here know (G4)."""
    try:
        core_gate(facts)
    except PrefixCacheUnmatchError as refusal:
        raise OmniPrefixCacheUnmatchError(
            f"{refusal}; or set enable_prefix_caching=False on this stage"
        ) from refusal
