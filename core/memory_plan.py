"""Host memory of a configuration, known before anything is allocated (M1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slotmirror.core.backend import Capabilities
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import HostMemoryLimitError
from slotmirror.core.key_spec import KeySpec


@dataclass(frozen=True, slots=True)
class KeyMemory:
    """Host bytes of one key: its durable rows, and its part of all staging pages."""

    key: KeySpec
    pool_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by class. `immediate_clone_bytes_max` and `deferred_clone_bytes_max` are on the device.

    pool_bytes      durable rows: num_blocks × block_size × row bytes, per key
    staging_bytes   staging_depth × staging_capacity_tokens × row bytes, per key; pinned if possible
    bounce_bytes    the committer's two buffers of copy_chunk_bytes, when rows are deferred
    """

    keys: tuple[KeyMemory, ...]
    bounce_bytes: int
    immediate_clone_bytes_max: int
    deferred_clone_bytes_max: int

    @property
    def pool_bytes(self) -> int:
        """Durable rows of all keys."""
        return sum(key.pool_bytes for key in self.keys)

    @property
    def staging_bytes(self) -> int:
        """Staging pages of all keys."""
        return sum(key.staging_bytes for key in self.keys)

    @property
    def host_bytes(self) -> int:
        """All host memory that is held for the life of the cache."""
        return self.pool_bytes + self.staging_bytes + self.bounce_bytes

    def __str__(self) -> str:
        keys = "; ".join(
            f"{entry.key}: pool {entry.pool_bytes:,} B, staging {entry.staging_bytes:,} B"
            for entry in self.keys
        )
        return f"{keys}; bounce {self.bounce_bytes:,} B; in all {self.host_bytes:,} B"


def plan_memory(
    config: PrefixCacheConfig, keys: Iterable[KeySpec], deferred_keys: frozenset[str] = frozenset()
) -> MemoryPlan:
    """What a cache of this configuration takes once these keys are open; allocates nothing."""
    page_rows = config.staging_depth * config.staging_capacity_tokens
    planned = tuple(
        KeyMemory(spec, config.num_slots * spec.row_bytes, page_rows * spec.row_bytes)
        for spec in keys
    )
    return MemoryPlan(
        keys=planned,
        bounce_bytes=2 * config.copy_chunk_bytes if deferred_keys else 0,
        immediate_clone_bytes_max=sum(
            entry.staging_bytes for entry in planned if entry.key.name not in deferred_keys
        ),
        deferred_clone_bytes_max=config.device_staging_bytes_max if deferred_keys else 0,
    )


def check_limits(
    config: PrefixCacheConfig,
    keys: Iterable[KeySpec],
    deferred_keys: frozenset[str],
    capabilities: Capabilities,
) -> None:
    """Raise `HostMemoryLimitError`, with the plan, if these keys exceed a limit.

    The operator's `host_memory_limit_bytes`, or what the device's driver can page-lock in all.
    """
    plan = plan_memory(config, keys, deferred_keys)
    limit, pinned_limit = config.host_memory_limit_bytes, capabilities.max_pinned_bytes
    pinned_bytes = plan.staging_bytes + plan.bounce_bytes + plan.pool_bytes * config.pin_pool
    if capabilities.pinned_host and pinned_limit is not None and pinned_bytes > pinned_limit:
        raise HostMemoryLimitError(
            f"opening these keys page-locks {pinned_bytes:,} B, this device's driver can lock "
            f"{pinned_limit:,} B: lower staging_depth, staging_capacity_tokens or copy_chunk_bytes"
            f"{', or unset pin_pool' if config.pin_pool else ''}: {plan}"
        )
    if limit is not None and plan.host_bytes > limit:
        raise HostMemoryLimitError(
            f"opening these keys takes {plan.host_bytes:,} B of host memory, "
            f"host_memory_limit_bytes is {limit:,}: {plan}"
        )
