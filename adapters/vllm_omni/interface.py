"""The value types of vLLM-Omni's prefix cache, as its runners use them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from slotmirror.core.config import MIB
from slotmirror.core.config import PrefixCacheConfig as CoreConfig
from slotmirror.core.errors import PrefixCacheUnmatchError
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.policy import ModelCachePolicy as CorePolicy


class OmniPrefixCacheUnmatchError(PrefixCacheUnmatchError, RuntimeError):
    """Whatever the drop-in refuses or fails with: its callers know this one class (G4)."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.field = ""
        self.value: object = None


class OmniPrefixCacheStagingTimeoutError(OmniPrefixCacheUnmatchError):
    """A bounded wait ran out, for a staging page above all."""


class WriteSchedule(Enum):
    """When a key's rows are written: with their step, or when their request ends."""

    JOIN_NEXT_STEP = "join_next_step"
    JOIN_ON_FINISH = "join_on_finish"


@dataclass(frozen=True)
class PrefixCacheConfig:
    """Sizes under their names there.

    `gpu_staging_bytes` charges deferred rows only; there, immediate clones too.
    """

    num_blocks: int
    block_size: int
    gpu_staging_bytes: int = 512 * MIB
    staging_depth: int = 4
    staging_capacity_tokens: int = 1024
    staging_claim_timeout_s: float = 30.0
    copy_chunk_bytes: int = 16 * MIB

    @classmethod
    def from_vllm_config(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        scheduler_config: Any = None,
        model_config: Any = None,
    ) -> PrefixCacheConfig:
        """A page holds the largest step: batched tokens, else the longest sequence, else 1,024."""
        sources = (
            (scheduler_config, "max_num_batched_tokens"),
            (scheduler_config, "max_model_len"),
            (model_config, "max_model_len"),
        )
        sizes = (getattr(source, name, None) for source, name in sources)
        capacity = next((size for size in sizes if isinstance(size, int) and size > 0), 1024)
        return cls(num_blocks, block_size, staging_capacity_tokens=capacity)


class StageCacheOutputs(NamedTuple):
    """Merged outputs of one step: request → rows, and key → request → payload."""

    hidden_states: dict[str, torch.Tensor] | None
    mm_outputs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ModelCachePolicy:
    """What a model asks of the cache."""

    needs_full_hidden_states: bool = True
    deferred_keys: frozenset[str] = field(default_factory=frozenset)

    @property
    def hidden_key(self) -> str | None:
        """The key of hidden rows; None for a model that opts out."""
        return HIDDEN_KEY if self.needs_full_hidden_states else None

    def get_hit_keys(self, keys: Iterable[str]) -> list[str]:
        """Keys to deliver on a hit, hidden rows first."""
        others = sorted(set(keys) - {HIDDEN_KEY})
        return [HIDDEN_KEY, *others] if self.needs_full_hidden_states else others

    def skip_immediate_mm(self, key: str) -> bool:
        """Whether a key among the model's outputs is not written with its step."""
        return key == HIDDEN_KEY or key in self.deferred_keys

    @classmethod
    def from_model(cls, model: Any) -> ModelCachePolicy:
        """From the attributes by which models state their needs."""
        core = CorePolicy.from_model(model)
        return cls(core.needs_full_hidden_states, core.deferred_keys)


def core_config(config: Any) -> CoreConfig:
    """A configuration, ours or theirs, for slotmirror's core, which checks every value."""
    return CoreConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        device_staging_bytes_max=config.gpu_staging_bytes,
        staging_depth=config.staging_depth,
        staging_capacity_tokens=config.staging_capacity_tokens,
        staging_claim_timeout_s=config.staging_claim_timeout_s,
        copy_chunk_bytes=config.copy_chunk_bytes,
    )


def core_policy(policy: Any) -> CorePolicy:
    """A policy, ours or theirs, for slotmirror's core."""
    return CorePolicy(policy.needs_full_hidden_states, frozenset(policy.deferred_keys))
