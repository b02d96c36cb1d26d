"""Who owns a request id, what it hits, and how far it has been delivered (D4, L1-L4).

Pure bookkeeping over arrays, one row per live owner. `plan` decides and may refuse; `apply`
changes and cannot fail. The manager lock covers both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from slotmirror.core.errors import (
    EngineDivergenceError,
    HitSpanError,
    RowLayoutError,
    UnknownRequestError,
)
from slotmirror.core.events import AdmittedRequest, Int64Array, StepEvents, ranges
from slotmirror.core.hits import NO_SPANS, HitSpans

Hit: TypeAlias = tuple[AdmittedRequest, int]
"""A request whose computed tokens are a hit, and the position from which they are read."""

UNCHANGED = replace(NO_SPANS)
"""The hits, none, of a step that schedules the requests of the step before."""


class HitRegistry:
    """Owners by request id, one row each in a few arrays.

    A row is an owner's identity: (request id, generation). It is given to a new owner only when
    its former one has ended *and* every step that may name it has been consumed, so a late call
    for an ended owner finds that owner's progress, never a successor's (L4).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._row_of: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._saved_end = np.empty(0, dtype=np.int64)
        self._delivered_end = np.empty(0, dtype=np.int64)
        # Rows of ended owners, with the last step that may name each.
        self._retired: deque[tuple[int, int]] = deque()
        self._preempted: set[str] = set()
        self._last_ids: tuple[str, ...] = ()
        self._last_rows = np.empty(0, dtype=np.int64)

    # -- deciding ---------------------------------------------------------------------------

    def plan(self, events: StepEvents) -> HitSpans:
        """Lay out the hit spans of the admitted requests; changes nothing.

        An id among `new` that is live is a resume if it was preempted since it last ran, otherwise
        a continuation, which has no hit span (L1). Raises `HitSpanError` (D4), `RowLayoutError`,
        `UnknownRequestError` and `EngineDivergenceError`, each naming the request.
        """
        if events.req_ids == self._last_ids and not events.changes_requests:
            return UNCHANGED
        ended = set(events.ended_generations)
        live = self._row_of.keys() - ended
        preempted = (self._preempted | set(events.preempted)) - ended
        new = {request.req_id for request in events.new}
        resumed = {request.req_id for request in events.resumed}
        index = {req_id: i for i, req_id in enumerate(events.req_ids)}
        running = index.keys() - new - resumed
        for strangers, what in (
            (resumed - live, "resumed"),
            (set(events.replaced) - new, "replaced, but not among the new"),
            (running - live, "scheduled"),
        ):
            if strangers:
                raise UnknownRequestError(sorted(strangers), what)
        stopped = sorted(running & preempted)
        if stopped:
            raise EngineDivergenceError(
                f"requests {stopped} are scheduled although they were preempted and not resumed"
            )
        if len(index) != len(events.req_ids):
            raise RowLayoutError(f"a request is scheduled twice in one step: {events.req_ids}")
        hits: list[Hit] = []
        for request in (*events.new, *events.resumed):
            if request.req_id not in live:
                hits.append((request, 0))
            elif request.req_id in preempted or request.req_id in resumed:
                row = self._row_of[request.req_id]
                hits.append((request, int(self._delivered_end[row])))
        return self._spans(events, index, hits)

    def _spans(self, events: StepEvents, index: Mapping[str, int], hits: list[Hit]) -> HitSpans:
        """The spans of these hits, each from its delivered position on."""
        size = self._block_size
        spans: list[tuple[int, int, int]] = []
        blocks: list[int] = []
        for request, delivered in hits:
            tokens, i = request.num_computed_tokens, index.get(request.req_id)
            fault = self._fault(request, None if i is None else int(events.first_positions[i]))
            if fault is not None:
                raise HitSpanError(request.req_id, tokens, fault)
            if i is not None and delivered < tokens:
                spans.append((i, delivered, tokens))
                blocks.extend(request.block_ids[: tokens // size])
        if not spans:
            return NO_SPANS
        requests, first, end = np.array(spans, dtype=np.int64).T
        slots = (np.array(blocks, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        slots = slots[ranges(end) >= np.repeat(first, end)]
        return HitSpans(requests, first, end - first, slots)

    def _fault(self, request: AdmittedRequest, first_position: int | None) -> str | None:
        """What is wrong with a hit of a request that is scheduled from this position, or not."""
        tokens, blocks, size = request.num_computed_tokens, request.block_ids, self._block_size
        if tokens < 0 or tokens % size:
            return f"not a whole number of blocks of {size} tokens"
        if len(blocks) * size < tokens:
            return f"needs {tokens // size} blocks, its table has {len(blocks)}"
        bad = [block for block in blocks if not 0 <= block < self._num_blocks]
        if bad:
            return f"block ids {bad[:8]} outside 0..{self._num_blocks - 1}"
        if first_position is None:
            return "a hit of a request that is not scheduled" if tokens else None
        if first_position != tokens:
            return f"its first scheduled position is {first_position}, not the end of the hit"
        return None

    # -- changing ---------------------------------------------------------------------------

    def apply(
        self, events: StepEvents, spans: HitSpans, step_id: int, oldest_unconsumed: int
    ) -> Int64Array:
        """Carry out events that gave these spans, in the order of C1; cannot fail.

        `step_id` is the new step's; steps below `oldest_unconsumed` are over. Returns the owner
        row of each scheduled request.
        """
        if spans is UNCHANGED:
            return self._last_rows
        rows, req_ids = self._row_of, events.req_ids
        for req_id in events.ended_generations:
            if req_id in rows:
                self._retired.append((step_id - 1, rows.pop(req_id)))
        while self._retired and self._retired[0][0] < oldest_unconsumed:
            self._free_rows.append(self._retired.popleft()[1])
        admitted = [request.req_id for request in (*events.new, *events.resumed)]
        stopped = self._preempted.union(events.preempted).difference(admitted)
        self._preempted = {req_id for req_id in stopped if req_id in rows}
        for req_id in admitted:
            if req_id not in rows:
                rows[req_id] = self._fresh_row()
        self._last_rows = np.fromiter((rows[r] for r in req_ids), np.int64, len(req_ids))
        self._last_ids = req_ids
        return self._last_rows

    def replays(self, owners: Int64Array, first: Int64Array) -> Int64Array:
        """Indices of requests whose hit, or `first` position, is below what they saved (L3)."""
        return (first < self._saved_end[owners]).nonzero()[0]

    def note_saved(self, owners: Int64Array, ends: Int64Array, replays: Int64Array) -> None:
        """The step's rows up to `ends` are saved; all but `replays` begin where others ended."""
        if len(replays):
            ends = np.maximum(self._saved_end[owners], ends)
        self._saved_end[owners] = ends

    def note_verified(self, owners: Int64Array, ends: Int64Array) -> None:
        """Rows from `ends` on were rejected drafts: they will be saved again (L7)."""
        self._saved_end[owners] = np.minimum(self._saved_end[owners], ends)

    def delivered_ends(self, owners: Int64Array) -> Int64Array:
        """Delivered positions as they stand now."""
        return self._delivered_end[owners]

    def note_delivered(self, owners: Int64Array, ends: Int64Array) -> None:
        """Rows up to `ends` were delivered."""
        self._delivered_end[owners] = np.maximum(self._delivered_end[owners], ends)

    def _fresh_row(self) -> int:
        """A row of nobody's, nothing saved and nothing delivered."""
        if not self._free_rows:
            old = len(self._saved_end)
            more = max(16, old)
            self._saved_end = np.pad(self._saved_end, (0, more))
            self._delivered_end = np.pad(self._delivered_end, (0, more))
            self._free_rows.extend(range(old + more - 1, old - 1, -1))
        row = self._free_rows.pop()
        self._saved_end[row] = self._delivered_end[row] = 0
        return row
