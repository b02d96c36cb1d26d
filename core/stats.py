"""Counters of one cache (O1). An add each on the hot path, nothing more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStats:
    """What a cache has done since it was made.

    Each counter is written by one thread, or under the manager or log lock; they are read without
    a lock, so those of one reading may be a step apart. Completed operations include dropped ones.
    """

    steps_started: int = 0
    steps_saved: int = 0
    steps_abandoned: int = 0
    steps_materialized: int = 0
    steps_discarded: int = 0
    tokens_saved: int = 0
    hits: int = 0
    hit_tokens: int = 0
    own_step_hit_tokens: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rows_captured_directly: int = 0
    rows_gathered: int = 0
    bytes_gathered: int = 0
    gathers_failed: int = 0
    operations_appended: int = 0
    operations_completed: int = 0
    operations_dropped: int = 0
    page_waits: int = 0
    page_wait_s: float = 0.0
    fence_waits: int = 0
    fence_wait_warnings: int = 0
    hit_buffer_bytes_high: int = 0
    device_bytes_high: int = 0
    device_budget_waits: int = 0
    deferred_rows_dead: int = 0
    failures: int = 0
    batches_closed: dict[str, int] = field(default_factory=dict)
