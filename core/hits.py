"""The hit rows of one step: whose they are, where they come from, where they go (D2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slotmirror.core.events import Int64Array, StepEvents, ranges
from slotmirror.core.hit_registry import NO_SPANS, HitSpans
from slotmirror.core.slot_table import NO_HIT_ROWS, BoolArray, HitRows


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """S hit spans with H rows in all.

    Every request has one *region* in each output buffer: its hit rows, then its computed rows, one
    contiguous run of positions. Regions of requests with hits come first, so that one gather reads
    the hit rows of all of them.

    region_starts  (S,) first output row of each hit request's region
    region_rows    output rows of all these regions
    out_rows       (H,) output row of each hit row
    """

    spans: HitSpans = NO_SPANS
    rows: HitRows = NO_HIT_ROWS
    region_starts: Int64Array = field(default_factory=lambda: NO_SPANS.first)
    region_rows: int = 0
    out_rows: Int64Array = field(default_factory=lambda: NO_SPANS.first)

    @classmethod
    def of(cls, events: StepEvents, spans: HitSpans, rows: HitRows) -> Hits:
        """Lay out the regions of these spans."""
        if spans is NO_SPANS:
            return NO_HITS
        region = spans.length + events.num_tokens[spans.request]
        ends = np.cumsum(region)
        starts = ends - region
        out_rows = np.repeat(starts, spans.length) + ranges(spans.length)
        return cls(spans, rows, starts, int(ends[-1]), out_rows)

    def __len__(self) -> int:
        """Hit rows."""
        return len(self.rows.slots)

    @property
    def num_own(self) -> int:
        """Hit rows that this very step computes (H1)."""
        return int(np.count_nonzero(self.rows.own_row >= 0))

    def lengths(self, num_requests: int) -> Int64Array:
        """(R,) hit rows of each request of the step."""
        lengths = np.zeros(num_requests, dtype=np.int64)
        lengths[self.spans.request] = self.spans.length
        return lengths

    def requests_with(self, present: BoolArray) -> Int64Array:
        """Indices of hit requests with at least one present row; `present` is (H,)."""
        starts = np.cumsum(self.spans.length) - self.spans.length
        return self.spans.request[np.logical_or.reduceat(present, starts)]


NO_HITS = Hits()
"""A step without hits: most of them, so nothing is computed for it."""
