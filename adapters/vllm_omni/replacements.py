"""What takes the place of what: vLLM-Omni's names, slotmirror's objects."""

from __future__ import annotations

from slotmirror.adapters.vllm_omni import group_view, interface, manager

REPLACEMENTS: dict[str, object] = {
    "FullAttentionGroupView": group_view.FullAttentionGroupView,
    "ModelCachePolicy": interface.ModelCachePolicy,
    "OmniPrefixCacheManager": manager.OmniPrefixCacheManager,
    "OmniPrefixCacheStagingTimeoutError": interface.OmniPrefixCacheStagingTimeoutError,
    "OmniPrefixCacheUnmatchError": interface.OmniPrefixCacheUnmatchError,
    "PrefixCacheConfig": interface.PrefixCacheConfig,
    "StageCacheOutputs": interface.StageCacheOutputs,
    "WriteSchedule": interface.WriteSchedule,
    "check_prefix_cache_kv_groups": group_view.check_prefix_cache_kv_groups,
    "check_prefix_cache_kv_transfer": group_view.check_prefix_cache_kv_transfer,
    "get_prefix_cache_group_view": group_view.get_prefix_cache_group_view,
    "stage_prefix_cache_config": group_view.stage_prefix_cache_config,
}
"""All that `vllm_omni.core.prefix_cache` lists, but: `HIDDEN_KEY`, which is the same text; the
controller and the block pool, which nothing but vLLM-Omni's own manager uses."""
