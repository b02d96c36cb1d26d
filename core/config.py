"""The cache's settings (K1)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Literal

from slotmirror.core.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """Sizes, budgets and time limits of one manager; checked when it is made.

    num_blocks                 blocks of the engine's KV pool
    block_size                 slots per block
    device_staging_bytes_max   device bytes that clones of deferred rows may take
    staging_depth              pages, and so steps that may be unconsumed at once
    staging_capacity_tokens    rows of a page: the engine's largest number of batched tokens
    staging_claim_timeout_s    how long a caller waits without progress of the log
    device_wait_timeout_s      how long a caller waits while the device has not finished a copy
    copy_chunk_bytes           size of a bounce buffer
    host_memory_limit_bytes    no key is opened beyond it; None: no limit
    hit_buffer_bytes_max       bytes of hit outputs that may be alive at once; None: no limit
    pin_pool                   page-lock the pool too
    pin_outputs                page-lock output buffers, for consumers on the device
    direct_capture_rows_min    with pin_pool, runs of at least so many neighbouring slots are copied
                               from the device straight into the pool; None: never (the default)
    mover_threads              threads among which one large operation is split
    prefetch                   read hits at the start of the step; off: at its save
    committer                  "threaded", or "inline": operations run where they are appended
    """

    num_blocks: int
    block_size: int
    device_staging_bytes_max: int = 512 * MIB
    staging_depth: int = 4
    staging_capacity_tokens: int = 1024
    staging_claim_timeout_s: float = 30.0
    device_wait_timeout_s: float = 300.0
    copy_chunk_bytes: int = 16 * MIB
    host_memory_limit_bytes: int | None = None
    hit_buffer_bytes_max: int | None = None
    pin_pool: bool = False
    pin_outputs: bool = False
    direct_capture_rows_min: int | None = None
    mover_threads: int = 1
    prefetch: bool = True
    committer: Literal["threaded", "inline"] = "threaded"

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        rows_min = self.direct_capture_rows_min
        if rows_min is not None and not self.pin_pool:
            rule = "must be None unless pin_pool is set: the device copies into page-locked memory"
            raise ConfigError("direct_capture_rows_min", rows_min, rule)

    @property
    def num_slots(self) -> int:
        """Slots of the engine's KV pool."""
        return self.num_blocks * self.block_size


def _check(field: str, annotation: str, value: object) -> None:
    if field == "committer":
        if value not in ("threaded", "inline"):
            raise ConfigError(field, value, 'must be "threaded" or "inline"')
    elif annotation == "bool":
        if not isinstance(value, bool):
            raise ConfigError(field, value, "must be true or false")
    elif annotation == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(field, value, "must be a finite number of seconds above 0")
    elif value is None and annotation == "int | None":
        return
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(field, value, "must be a whole number")
    elif value < 1:
        raise ConfigError(field, value, "must be at least 1")
