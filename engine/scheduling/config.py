"""Settings of a scheduler and the KV cache under it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slotmirror.engine.scheduling.request_queue import SchedulingPolicy
from slotmirror.kvcache.hash_functions import HASH_FUNCTIONS, KeyFormat
from slotmirror.kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes in tokens unless the name says blocks. Bad values raise ValueError naming the setting.

    - `watermark`: share of the pool left free by admissions while other requests run.
    - `reserve_full_isl`: admit a request only if all its known tokens fit now, not just its
      first chunk (public issue 37307).
    - `long_prefill_token_threshold`: longest prefill chunk per request and step; 0 is no limit.
    - `encoder_budget`, `encoder_cache_size`: placeholder tokens whose encoder outputs one step may
      compute, and all steps may keep; None means `max_num_batched_tokens`.
    - `num_speculative_tokens`: draft tokens per step; with `use_eagle` slots for them are
      allocated ahead and hits give up their last block.
    - `resumed_as_new`: tell the worker about resumed requests as if they were new (the form of
      vLLM's model runner V2).
    - `kv_metrics_sample_rate`: share of blocks whose residency is measured; 0 is off.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    key_format: KeyFormat = KeyFormat.TAGGED
    hash_block_size: int | None = None
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    watermark: float = 0.0
    reserve_full_isl: bool = True
    long_prefill_token_threshold: int = 0
    encoder_budget: int | None = None
    encoder_cache_size: int | None = None
    disable_chunked_mm_input: bool = False
    use_eagle: bool = False
    num_speculative_tokens: int = 0
    retention_interval: int | None = None
    resumed_as_new: bool = False
    enable_kv_cache_events: bool = False
    use_int_block_hashes: bool = True
    kv_metrics_sample_rate: float = 0.0

    def __post_init__(self) -> None:
        positive = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
        for name in (*positive, "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("long_prefill_token_threshold", "num_speculative_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.prefix_caching_hash_algo not in HASH_FUNCTIONS:
            raise ValueError(
                f"prefix_caching_hash_algo must be one of {', '.join(HASH_FUNCTIONS)}, "
                f"not {self.prefix_caching_hash_algo!r}"
            )
        object.__setattr__(self, "policy", SchedulingPolicy(self.policy))
        object.__setattr__(self, "key_format", KeyFormat(self.key_format))

    @property
    def encoder_budget_tokens(self) -> int:
        budget = self.encoder_budget
        return self.max_num_batched_tokens if budget is None else budget

    @property
    def encoder_cache_tokens(self) -> int:
        size = self.encoder_cache_size
        return self.max_num_batched_tokens if size is None else size

    @property
    def num_lookahead_tokens(self) -> int:
        return self.num_speculative_tokens if self.use_eagle else 0

    def kv_cache_config(self, groups: Sequence[KVCacheGroupSpec] | None) -> KVCacheConfig:
        """The pool with these groups, by default one full-attention group of `block_size`."""
        if groups is None:
            groups = (KVCacheGroupSpec(FullAttentionSpec(self.block_size)),)
        return KVCacheConfig(self.num_blocks, tuple(groups))

    def restricted_to(self, kv_cache: KVCacheConfig) -> "SchedulerConfig":
        """These settings without what the groups forbid: a non-causal one rules out prefix
        caching and chunked prefill, because its KV depends on later tokens."""
        if kv_cache.is_causal:
            return self
        return replace(self, enable_prefix_caching=False, enable_chunked_prefill=False)
