"""The hit rows of one step: whose they are, where they come from, where they go (D2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slotmirror.core.events import Int64Array, StepEvents, offsets, ranges
from slotmirror.core.layout import batch_rows
from slotmirror.core.slot_table import BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class HitSpans:
    """The hit spans that a step delivers, one entry per hit request; S spans, H rows.

    request  (S,) index of the request in the step's `req_ids`
    first    (S,) first position read: what is delivered already is not read again (L2)
    length   (S,) rows, up to the request's first computed position
    slots    (H,) slot of each row, span after span
    """

    request: Int64Array
    first: Int64Array
    length: Int64Array
    slots: Int64Array

    def first_delivered(self, events: StepEvents) -> Int64Array:
        """(R,) position of the first row of each request: of its hit, else of what it computes."""
        if not len(self.request):
            return events.first_positions
        first = events.first_positions.copy()
        first[self.request] = self.first
        return first


_NOTHING: Int64Array = np.empty(0, dtype=np.int64)
NO_SPANS = HitSpans(_NOTHING, _NOTHING, _NOTHING, _NOTHING)
"""A step without hits: most of them, so nothing is computed for it."""


class Hits:
    """Hit spans with H rows in all, of which the pool has some for K open keys.

    Every request has one *region* in each output buffer: its hit rows, then its computed rows, one
    contiguous run of positions. Regions of requests with hits come first, so that one gather reads
    the hit rows of all of them.

    own_row      (H,) the row of this very step, in batch order, that writes the slot, or -1 (H1)
    present      (H, K or more) whether the pool has the row for the key when this step has claimed
                 its slots; the columns of keys that are not open are False
    region_rows  output rows of the regions of requests with hits
    out_rows     (H,) output row of each hit row
    """

    def __init__(
        self, events: StepEvents, spans: HitSpans, own_row: Int64Array, present: BoolArray
    ) -> None:
        self.spans = spans
        self.own_row = own_row
        self.present = present
        regions = spans.length + events.num_tokens[spans.request]
        self.region_rows = int(regions.sum())
        self.out_rows = np.repeat(offsets(regions), spans.length) + ranges(spans.length)

    def __len__(self) -> int:
        """Hit rows."""
        return len(self.out_rows)

    def row_of_position_0(self, events: StepEvents, page_offsets: Int64Array) -> Int64Array:
        """(R,) what a request's position and its output row differ by; may be negative.

        Regions of requests without hits follow the others, in page order.
        """
        if not len(self):
            return page_offsets - events.first_positions
        first = self.spans.first_delivered(events)
        others = np.flatnonzero(first == events.first_positions)
        others = others[np.argsort(page_offsets[others])]
        lengths = events.first_positions + events.num_tokens - first
        return offsets(lengths, np.concatenate((self.spans.request, others))) - first

    def own_rows(
        self, events: StepEvents, order: Int64Array | None
    ) -> tuple[Int64Array, Int64Array]:
        """(output rows, page rows) of the hit rows that this very step computed (H1)."""
        own = np.flatnonzero(self.own_row >= 0)
        rows = self.own_row[own]
        if len(own) and order is not None:
            rows = np.argsort(batch_rows(events, order))[rows]
        return self.out_rows[own], rows

    def requests_with(self, key_index: int) -> Int64Array:
        """Indices of hit requests of which the pool has at least one row for the key."""
        present = self.present[:, key_index]
        return self.spans.request[np.logical_or.reduceat(present, offsets(self.spans.length))]


NO_HITS = Hits(StepEvents(), NO_SPANS, _NOTHING, np.empty((0, 0), dtype=np.bool_))
"""A step without hits."""
