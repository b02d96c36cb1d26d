"""Row arithmetic of one saved step: where its rows lie on the page, and where in the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotmirror.core.errors import RowLayoutError
from slotmirror.core.events import Int64Array, StepEvents, ranges
from slotmirror.core.hits import NO_HITS, Hits


class StepLayout:
    """R requests, H hit rows, n computed rows; made by whoever delivers the step.

    hit_lengths    (R,) hit rows of each request
    batch_offsets  (R,) first row of each request in batch order, the order of the step's slots
    page_offsets   (R,) first row of each request on the page
    out_offsets    (R,) first row of each request's region in an output buffer
    region_first   (R,) position of the first row of each region
    """

    def __init__(
        self, events: StepEvents, hits: Hits = NO_HITS, order: Int64Array | None = None
    ) -> None:
        self.req_ids = events.req_ids
        self.first = events.first_positions
        self.counts = events.num_tokens
        self.hits = hits
        self.num_rows = events.total_tokens
        self.out_rows = self.num_rows + len(hits)
        self.batch_offsets = np.cumsum(self.counts) - self.counts
        self.page_offsets = self.batch_offsets
        if order is not None:
            counts = self.counts[order]
            self.page_offsets = np.empty_like(self.batch_offsets)
            self.page_offsets[order] = np.cumsum(counts) - counts
        if hits is NO_HITS:
            self.hit_lengths = np.zeros_like(self.counts)
            self.out_offsets, self.region_first = self.page_offsets, self.first
        else:
            self.hit_lengths = hits.lengths(len(self.req_ids))
            self.out_offsets = self._regions()
            self.region_first = self.first - self.hit_lengths

    def _regions(self) -> Int64Array:
        """Regions of requests with hits, then the others in page order."""
        offsets = np.empty_like(self.batch_offsets)
        offsets[self.hits.spans.request] = self.hits.region_starts
        others = np.flatnonzero(self.hit_lengths == 0)
        others = others[np.argsort(self.page_offsets[others], kind="stable")]
        counts = self.counts[others]
        offsets[others] = self.hits.region_rows + np.cumsum(counts) - counts
        return offsets

    def own_hits(self) -> tuple[Int64Array, Int64Array]:
        """(output rows, page rows) of the hit rows that this step itself computed (H1)."""
        own_row = self.hits.rows.own_row
        own = np.flatnonzero(own_row >= 0)
        batch_rows = own_row[own]
        request = np.searchsorted(self.batch_offsets + self.counts, batch_rows, side="right")
        page_rows = self.page_offsets[request] + batch_rows - self.batch_offsets[request]
        return self.hits.out_rows[own], page_rows


def check_counts(events: StepEvents, num_tokens_unpadded: int, num_tokens_padded: int) -> None:
    """Raise `RowLayoutError` unless these are the step's token counts (S4)."""
    if num_tokens_unpadded != events.total_tokens:
        raise RowLayoutError(
            f"num_tokens_unpadded={num_tokens_unpadded}, but this step's requests were "
            f"scheduled for {events.total_tokens} tokens"
        )
    if num_tokens_padded < num_tokens_unpadded:
        raise RowLayoutError(
            f"num_tokens_padded={num_tokens_padded} is below "
            f"num_tokens_unpadded={num_tokens_unpadded}"
        )


def row_order(events: StepEvents, req_ids: Sequence[str] | None) -> Int64Array | None:
    """The order of requests on the page, as indices; None where it is the batch order.

    Raises `RowLayoutError` unless `req_ids` is an order of exactly the scheduled requests.
    """
    if req_ids is None or tuple(req_ids) == events.req_ids:
        return None
    index = {req_id: i for i, req_id in enumerate(events.req_ids)}
    unknown = [req_id for req_id in req_ids if req_id not in index]
    if unknown or len(req_ids) != len(index) or len(set(req_ids)) != len(index):
        raise RowLayoutError(
            f"req_ids {list(req_ids)} is not an order of the requests scheduled in this step "
            f"{list(events.req_ids)}"
        )
    return np.fromiter((index[req_id] for req_id in req_ids), np.int64, len(index))


def ordered_slots(events: StepEvents, order: Int64Array | None) -> Int64Array:
    """(n,) the slot of each page row."""
    if order is None:
        return events.slots
    counts = events.num_tokens
    offsets = np.cumsum(counts) - counts
    return events.slots[np.repeat(offsets[order], counts[order]) + ranges(counts[order])]
