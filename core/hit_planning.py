"""What a step reads: one gather per key for all of its hits, planned when it starts (C2)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import HitBufferMeter, OutputBuffers, rows_view
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import RowLayoutError
from slotmirror.core.events import Int64Array, StepEvents, ranges
from slotmirror.core.hits import Hits
from slotmirror.core.operations import GatherTask
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import NOTHING_MISSING, MissingRows

_INT64 = np.dtype(np.int64)
_NO_ROWS: Int64Array = np.empty(0, dtype=np.int64)


def check_shape(events: StepEvents) -> None:
    """Raise `RowLayoutError` unless the arrays of a step fit each other (S4)."""
    counts, first = events.num_tokens, events.first_positions
    if not len(events.req_ids) == len(counts) == len(first):
        raise RowLayoutError(
            f"{len(events.req_ids)} scheduled requests, but {len(counts)} token counts and "
            f"{len(first)} first positions"
        )
    if not counts.dtype == first.dtype == events.slots.dtype == _INT64:
        raise RowLayoutError(
            f"num_tokens is {counts.dtype}, first_positions {first.dtype}, slots "
            f"{events.slots.dtype}: all must be int64"
        )
    if len(counts) and (np.minimum.reduce(counts) < 1 or np.minimum.reduce(first) < 0):
        odd = np.flatnonzero((counts < 1) | (first < 0)).tolist()
        raise RowLayoutError(
            f"requests {[events.req_ids[i] for i in odd]} are scheduled with no token or from a "
            "negative position"
        )
    total = np.add.reduce(counts)
    if total != len(events.slots):
        raise RowLayoutError(f"{total} scheduled tokens, but {len(events.slots)} slots")


def check_slots(events: StepEvents, config: PrefixCacheConfig) -> None:
    """Raise `RowLayoutError` unless every slot exists; the arrays fit each other (S4)."""
    slots = events.slots
    # A negative slot is a huge unsigned one, so one pass finds both.
    if not len(slots) or np.maximum.reduce(slots.view(np.uint64)) < config.num_slots:
        return
    bad = np.flatnonzero((slots < 0) | (slots >= config.num_slots))
    owner = np.repeat(np.arange(len(events.req_ids)), events.num_tokens)
    names = list(dict.fromkeys(events.req_ids[i] for i in owner[bad].tolist()))
    raise RowLayoutError(
        f"requests {names} write slots {slots[bad][:8].tolist()} outside "
        f"0..{config.num_slots - 1}: their block tables lack blocks, or num_blocks "
        f"({config.num_blocks}) and block_size ({config.block_size}) are not the engine's"
    )


class HitPlanner:
    """Plans gathers. Engine thread; allocates, so it is called without locks."""

    def __init__(self, buffers: OutputBuffers, meter: HitBufferMeter, stats: CacheStats) -> None:
        self._buffers = buffers
        self._meter = meter
        self._stats = stats

    def gathers(
        self, events: StepEvents, hits: Hits, keys: Iterable[OpenKey]
    ) -> dict[str, GatherTask]:
        """One gather for each key that has a row anywhere in the step's hit spans, by name.

        Raises `HostMemoryLimitError` before anything is allocated (M3).
        """
        present = hits.rows.present
        wanted = [key for key in keys if present[:, key.index].any()]
        out_rows = events.total_tokens + len(hits)
        self._meter.check(sum(out_rows * key.spec.row_bytes for key in wanted))
        return {key.spec.name: self._gather(hits, out_rows, key) for key in wanted}

    def _gather(self, hits: Hits, out_rows: int, key: OpenKey) -> GatherTask:
        present = hits.rows.present[:, key.index]
        # One index for the whole region of the hits: rows that are not the pool's are read from
        # some slot, and then zeroed or overwritten from the page.
        slots = np.zeros(hits.region_rows, dtype=np.int64)
        slots[hits.out_rows] = hits.rows.slots
        zero_rows = _NO_ROWS
        if not present.all():
            zero_rows = hits.out_rows[~present]
        lease = self._meter.lease(self._buffers, out_rows * key.spec.row_bytes)
        self._stats.hit_buffer_bytes_high = self._meter.bytes_high
        return GatherTask(
            f"for {len(hits.spans.request)} hits",
            key,
            slots,
            zero_rows,
            len(present) - len(zero_rows),
            lease,
            rows_view(lease, key.spec)[: hits.region_rows],
            self._stats,
        )


def missing_rows(hits: Hits, hidden: OpenKey | None) -> MissingRows:
    """Hit rows without hidden states: neither in the pool nor computed by the step (D5)."""
    rows, spans = hits.rows, hits.spans
    has_row = rows.own_row >= 0
    if hidden is not None:
        has_row = has_row | rows.present[:, hidden.index]
    absent = np.flatnonzero(~has_row)
    if not len(absent):
        return NOTHING_MISSING
    request = np.repeat(spans.request, spans.length)
    position = np.repeat(spans.first, spans.length) + ranges(spans.length)
    return MissingRows(request[absent], position[absent], rows.slots[absent])
