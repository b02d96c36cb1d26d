"""What a step reads: one gather per key for all of its hits, planned when it starts (C2)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import HitBufferMeter, OutputBuffers, rows_view
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import RowLayoutError
from slotmirror.core.events import StepEvents, ranges
from slotmirror.core.operations import GatherTask
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import NOTHING_MISSING, MissingRows, StepLayout


def check_shape(events: StepEvents) -> None:
    """Raise `RowLayoutError` unless the arrays of a step fit each other (S4)."""
    counts, first = events.num_tokens, events.first_positions
    if not len(events.req_ids) == len(counts) == len(first):
        raise RowLayoutError(
            f"{len(events.req_ids)} scheduled requests, but {len(counts)} token counts and "
            f"{len(first)} first positions"
        )
    odd = np.flatnonzero((counts < 1) | (first < 0)).tolist()
    if odd:
        raise RowLayoutError(
            f"requests {[events.req_ids[i] for i in odd]} are scheduled with no token or from a "
            "negative position"
        )
    if counts.sum() != len(events.slots):
        raise RowLayoutError(f"{counts.sum()} scheduled tokens, but {len(events.slots)} slots")


def check_slots(events: StepEvents, config: PrefixCacheConfig) -> None:
    """Raise `RowLayoutError` unless every slot exists; the arrays fit each other (S4)."""
    bad = np.flatnonzero((events.slots < 0) | (events.slots >= config.num_slots))
    if len(bad):
        owner = np.repeat(np.arange(len(events.req_ids)), events.num_tokens)
        names = list(dict.fromkeys(events.req_ids[i] for i in owner[bad].tolist()))
        raise RowLayoutError(
            f"requests {names} write slots {events.slots[bad][:8].tolist()} outside "
            f"0..{config.num_slots - 1}: their block tables lack blocks, or num_blocks "
            f"({config.num_blocks}) and block_size ({config.block_size}) are not the engine's"
        )


class HitPlanner:
    """Plans gathers. Engine thread; allocates, so it is called without locks."""

    def __init__(self, buffers: OutputBuffers, meter: HitBufferMeter, stats: CacheStats) -> None:
        self._buffers = buffers
        self._meter = meter
        self._stats = stats

    def gathers(self, layout: StepLayout, keys: Iterable[OpenKey]) -> dict[str, GatherTask]:
        """One gather for each key that has a row anywhere in the step's hit spans, by name.

        Raises `HostMemoryLimitError` before anything is allocated (M3).
        """
        present = layout.hit_rows.present
        if not len(present):
            return {}
        wanted = [k for k in keys if k.index < present.shape[1] and present[:, k.index].any()]
        self._meter.check(sum(layout.out_rows * key.spec.row_bytes for key in wanted))
        return {key.spec.name: self._gather(layout, key) for key in wanted}

    def _gather(self, layout: StepLayout, key: OpenKey) -> GatherTask:
        present = layout.hit_rows.present[:, key.index]
        # One index for the whole region of the hits: rows that are not the pool's are read from
        # slot 0, which is as good as any, and then zeroed or overwritten from the page.
        slots = np.zeros(layout.hit_region_rows, dtype=np.int64)
        slots[layout.hit_out_rows[present]] = layout.hit_rows.slots[present]
        num_bytes = layout.out_rows * key.spec.row_bytes
        lease = self._meter.lease(self._buffers, num_bytes)
        self._stats.hit_buffer_bytes_high = self._meter.bytes_high
        return GatherTask(
            f"for {layout.num_hits} hits",
            key,
            slots,
            layout.hit_out_rows[~present],
            int(present.sum()),
            lease,
            rows_view(lease, key.spec)[: layout.hit_region_rows],
            self._stats,
        )


def missing_rows(layout: StepLayout, hidden: OpenKey | None) -> MissingRows:
    """Hit rows without hidden states: neither in the pool nor computed by the step (D5)."""
    hit_rows, spans = layout.hit_rows, layout.spans
    has_row = hit_rows.own_row >= 0
    if hidden is not None and hidden.index < hit_rows.present.shape[1]:
        has_row = has_row | hit_rows.present[:, hidden.index]
    absent = np.flatnonzero(~has_row)
    if not len(absent):
        return NOTHING_MISSING
    request = np.repeat(spans.request, spans.length)
    position = np.repeat(spans.first, spans.length) + ranges(spans.length)
    return MissingRows(request[absent], position[absent], hit_rows.slots[absent])
