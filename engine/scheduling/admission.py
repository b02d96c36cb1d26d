"""Requests that could never run are refused when they are submitted (public issue 39734)."""

from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.kvcache.manager import KVCacheManager


def check_length(
    req_id: str, num_prompt: int, max_tokens: int, config: SchedulerConfig, manager: KVCacheManager
) -> None:
    """Raise ValueError if such a request can never be computed to its end with these settings.

    A request that outgrew the pool would preempt itself for ever at the head of the queue.
    """
    name = f"request {req_id!r}"
    if num_prompt >= config.max_model_len:
        raise ValueError(
            f"{name}: {num_prompt} prompt tokens leave no room for an output within "
            f"max_model_len={config.max_model_len}"
        )
    if num_prompt > config.max_num_batched_tokens and not config.enable_chunked_prefill:
        raise ValueError(
            f"{name}: {num_prompt} prompt tokens exceed max_num_batched_tokens="
            f"{config.max_num_batched_tokens}, and without chunked prefill a prompt is one step"
        )
    # The last sampled token is never computed, so it needs no slot.
    num_slots = min(num_prompt + max_tokens - 1, config.max_model_len)
    num_blocks = manager.max_blocks_held(num_slots + config.num_lookahead_tokens)
    if num_blocks > config.num_blocks - 1:
        raise ValueError(
            f"{name}: {num_prompt} prompt tokens and up to {max_tokens} new ones need "
            f"{num_blocks} blocks, but the pool has {config.num_blocks - 1}: raise num_blocks or "
            "lower max_tokens"
        )
