"""One step: where its rows lie on the page, and where they go in the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.errors import EngineDivergenceError, InternalError, RowLayoutError
from slotmirror.core.events import Int64Array, StepEvents, ranges
from slotmirror.core.hit_registry import HitSpans
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.operations import GatherTask
from slotmirror.core.slot_table import BoolArray, HitRows
from slotmirror.core.staging import StagingPage


class StepLayout:
    """Row arithmetic of one step; R requests, S hit spans, H hit rows, n computed rows.

    Every request has one *region* in each output buffer: its hit rows, then its computed rows, one
    contiguous run of positions (D2). Regions of requests with hits come first, so that one gather
    reads the hit rows of all of them.
    """

    def __init__(self, events: StepEvents, spans: HitSpans, hit_rows: HitRows) -> None:
        self.req_ids = events.req_ids
        self.slots = events.slots
        self.first = events.first_positions
        self.counts = events.num_tokens
        self.spans = spans
        self.hit_rows = hit_rows
        self.hit_lengths = np.zeros(len(self.req_ids), dtype=np.int64)
        self.hit_lengths[spans.request] = spans.length
        self.batch_offsets = np.cumsum(self.counts) - self.counts
        """(R,) first row of each request in batch order, the order of `slots`."""
        self.page_offsets = self.batch_offsets
        """(R,) first row of each request on the page; final after `order_rows`."""
        self.out_offsets = self.batch_offsets.copy()
        """(R,) first row of each request's region; final after `order_rows`."""
        self.hit_region_rows = 0
        self.hit_out_rows = np.empty(0, dtype=np.int64)
        """(H,) output row of each hit row."""
        if len(spans.request):
            self._place_hit_regions()

    def _place_hit_regions(self) -> None:
        region = self.spans.length + self.counts[self.spans.request]
        ends = np.cumsum(region)
        self.out_offsets[self.spans.request] = ends - region
        self.hit_region_rows = int(ends[-1])
        starts = np.repeat(ends - region, self.spans.length)
        self.hit_out_rows = starts + ranges(self.spans.length)

    @property
    def num_rows(self) -> int:
        """Rows that the step computes (n)."""
        return len(self.slots)

    @property
    def num_hits(self) -> int:
        """Requests with hit rows."""
        return len(self.spans.request)

    @property
    def num_own_hit_rows(self) -> int:
        """Hit rows that this step itself computes."""
        return int(np.count_nonzero(self.hit_rows.own_row >= 0))

    @property
    def out_rows(self) -> int:
        """Rows of an output buffer."""
        return self.num_rows + len(self.hit_out_rows)

    @property
    def ends(self) -> Int64Array:
        """(R,) position after each request's last computed row."""
        return self.first + self.counts

    @property
    def region_first(self) -> Int64Array:
        """(R,) position of the first row of each region."""
        return self.first - self.hit_lengths

    def indices_of(self, req_ids: Sequence[str]) -> Int64Array:
        """Indices of the scheduled requests among these ids."""
        if not req_ids:
            return np.empty(0, dtype=np.int64)
        wanted = set(req_ids)
        return np.array([i for i, r in enumerate(self.req_ids) if r in wanted], dtype=np.int64)

    def check_counts(self, num_tokens_unpadded: int, num_tokens_padded: int) -> None:
        """Raise `RowLayoutError` unless these are the step's token counts (S4)."""
        if num_tokens_unpadded != self.num_rows:
            raise RowLayoutError(
                f"num_tokens_unpadded={num_tokens_unpadded}, but this step's requests were "
                f"scheduled for {self.num_rows} tokens"
            )
        if num_tokens_padded < num_tokens_unpadded:
            raise RowLayoutError(
                f"num_tokens_padded={num_tokens_padded} is below "
                f"num_tokens_unpadded={num_tokens_unpadded}"
            )

    def row_order(self, req_ids: Sequence[str] | None) -> Int64Array | None:
        """The order of requests on the page, as indices; None where it is the batch order.

        Raises `RowLayoutError` unless `req_ids` is an order of exactly the scheduled requests.
        """
        if req_ids is None or tuple(req_ids) == self.req_ids:
            return None
        index = {req_id: i for i, req_id in enumerate(self.req_ids)}
        unknown = [req_id for req_id in req_ids if req_id not in index]
        if unknown or len(req_ids) != len(index) or len(set(req_ids)) != len(index):
            raise RowLayoutError(
                f"req_ids {list(req_ids)} is not an order of the requests scheduled in this step "
                f"{list(self.req_ids)}"
            )
        return np.fromiter((index[req_id] for req_id in req_ids), np.int64, len(index))

    def order_rows(self, order: Int64Array | None) -> Int64Array:
        """Lay out page and outputs for the row order; returns the slot of each page row.

        May be repeated, with another order, as the save may (C3).
        """
        slots, self.page_offsets = self.slots, self.batch_offsets
        if order is not None:
            counts = self.counts[order]
            self.page_offsets = np.empty_like(self.batch_offsets)
            self.page_offsets[order] = np.cumsum(counts) - counts
            slots = slots[np.repeat(self.batch_offsets[order], counts) + ranges(counts)]
        self._place_other_regions()
        return slots

    def _place_other_regions(self) -> None:
        if not self.hit_region_rows:
            self.out_offsets = self.page_offsets
            return
        others = np.flatnonzero(self.hit_lengths == 0)
        others = others[np.argsort(self.page_offsets[others], kind="stable")]
        counts = self.counts[others]
        self.out_offsets[others] = self.hit_region_rows + np.cumsum(counts) - counts

    def own_hits(self) -> tuple[Int64Array, Int64Array]:
        """(output rows, page rows) of the hit rows that this step itself computed (H1)."""
        own = np.flatnonzero(self.hit_rows.own_row >= 0)
        batch_rows = self.hit_rows.own_row[own]
        request = np.searchsorted(self.batch_offsets + self.counts, batch_rows, side="right")
        page_rows = self.page_offsets[request] + batch_rows - self.batch_offsets[request]
        return self.hit_out_rows[own], page_rows

    def spans_present(self, present: BoolArray) -> Int64Array:
        """Indices of hit requests with at least one present row, `present` being (H,)."""
        if not len(present):
            return np.empty(0, dtype=np.int64)
        starts = np.cumsum(self.spans.length) - self.spans.length
        return self.spans.request[np.logical_or.reduceat(present, starts)]


@dataclass(frozen=True, slots=True, eq=False)
class MissingRows:
    """Hit rows whose hidden states are absent (D5): index of the request, position, slot; (M,)."""

    request: Int64Array
    position: Int64Array
    slot: Int64Array


_NO_ROWS = np.empty(0, dtype=np.int64)
NOTHING_MISSING = MissingRows(_NO_ROWS, _NO_ROWS, _NO_ROWS)


class StepState(Enum):
    """Where a step stands; `manager.py` moves it."""

    OPEN = "open"
    SAVED = "saved"
    CONSUMING = "consuming"


@dataclass(slots=True, eq=False)
class Step:
    """One step from its start to its consumption; fields from `page` on are filled at the save.

    The manager lock covers `state` and `delivered_before`, the positions up to which steps before
    this one have delivered each request; a replay's last earlier step is consumed before it is
    (L3). The rest is written by the engine thread before the step id is given out.
    """

    step_id: int
    layout: StepLayout
    gathers: dict[str, GatherTask]
    missing: MissingRows
    epoch: int
    owners: Int64Array
    replays: Int64Array
    drafted: Int64Array
    """Indices of requests with unverified drafts; empty once they are verified (L7)."""
    ends: Int64Array
    """(R,) position after each request's last row that may be delivered."""
    state: StepState = StepState.OPEN
    page: StagingPage | None = None
    saved_keys: tuple[OpenKey, ...] = ()
    leftovers: LeftoverPack | None = None
    clones: tuple[torch.Tensor, ...] = ()
    launched: bool = False
    delivered_before: Int64Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def verified_ends(self, positions: Mapping[str, int]) -> Int64Array:
        """Ends of the drafted requests, cut at the accepted tokens; changes nothing (L7).

        Raises `EngineDivergenceError` for one whose accepted position is missing or impossible.
        """
        layout = self.layout
        names = [layout.req_ids[i] for i in self.drafted.tolist()]
        ends = np.array([positions.get(name, -1) for name in names], dtype=np.int64)
        wrong = (ends <= layout.first[self.drafted]) | (ends > layout.ends[self.drafted])
        if wrong.any():
            raise EngineDivergenceError(
                f"step {self.step_id} computed drafts of {names}: verified_positions "
                f"{dict(positions)} must name an accepted position within each one's rows"
            )
        return ends

    def settle_drafts(self, accepted: Int64Array) -> None:
        """Deliver the drafted requests up to `accepted`, which `verified_ends` gave."""
        self.ends = self.ends.copy()
        self.ends[self.drafted] = accepted
        self.drafted = self.drafted[:0]

    @property
    def saved_page(self) -> StagingPage:
        """The page of a saved step."""
        if self.page is None:
            raise InternalError(f"step {self.step_id} has no page: it was not saved")
        return self.page

    def missing_in(self, wanted: Sequence[str] | None) -> list[tuple[str, list[int]]]:
        """Requests among these with missing rows that would be delivered, and their slots (D5).

        What an earlier step has delivered already is not read, so it is not missed (L2).
        """
        missing = self.missing
        if not len(missing.request):
            return []
        due = missing.position >= self.delivered_before[missing.request]
        found: list[tuple[str, list[int]]] = []
        for request in np.unique(missing.request[due]).tolist():
            req_id = self.layout.req_ids[request]
            if wanted is None or req_id in wanted:
                found.append((req_id, missing.slot[due & (missing.request == request)].tolist()))
        return found
