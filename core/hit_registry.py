"""Who owns a request id, what it hits, and how far it has been delivered (D4, L1-L4).

Pure bookkeeping over arrays, one row per live owner. `plan` decides and may refuse; `apply`
changes and cannot fail. The manager lock covers both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from slotmirror.core.errors import (
    EngineDivergenceError,
    HitSpanError,
    RowLayoutError,
    UnknownRequestError,
)
from slotmirror.core.events import AdmittedRequest, Int64Array, StepEvents, ranges
from slotmirror.core.hits import NO_SPANS, HitSpans


@dataclass(frozen=True, slots=True, eq=False)
class RegistryPlan:
    """What `HitRegistry.plan` decided; `apply` carries it out."""

    fresh: tuple[str, ...]
    returning: tuple[str, ...]
    spans: HitSpans


UNCHANGED = RegistryPlan((), (), NO_SPANS)
"""The plan of a step that schedules the requests of the step before."""


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

    def __len__(self) -> int:
        """Live owners."""
        return len(self._row_of)

    # -- deciding ---------------------------------------------------------------------------

    def plan(self, events: StepEvents) -> RegistryPlan:
        """Classify the admitted requests and lay out their hit spans; changes nothing.

        An id among `new` that is live is a resume if it was preempted since it last ran, otherwise
        a continuation, which has no hit span (L1). Raises `HitSpanError` (D4),
        `UnknownRequestError` and `EngineDivergenceError`, each naming the request.
        """
        if events.req_ids == self._last_ids and not events.changes_requests:
            return UNCHANGED
        ended = set(events.ended_generations)
        preempted = (self._preempted | set(events.preempted)) - ended
        fresh: list[str] = []
        returning: list[str] = []
        hits: list[tuple[AdmittedRequest, int]] = []
        for request in events.new:
            if request.req_id not in self._row_of or request.req_id in ended:
                fresh.append(request.req_id)
                hits.append((request, 0))
                continue
            returning.append(request.req_id)
            if request.req_id in preempted:
                hits.append((request, self._delivered(request.req_id)))
        for request in events.resumed:
            if request.req_id not in self._row_of or request.req_id in ended:
                raise UnknownRequestError([request.req_id], "resumed")
            returning.append(request.req_id)
            hits.append((request, self._delivered(request.req_id)))
        strangers = set(events.replaced).difference(request.req_id for request in events.new)
        if strangers:
            raise UnknownRequestError(sorted(strangers), "replaced, but not among the new")
        self._check_running(events.req_ids, ended, preempted, {*fresh, *returning})
        for request, _ in hits:
            self._check_hit(request)
        return RegistryPlan(tuple(fresh), tuple(returning), self._spans(events, hits))

    def _check_running(
        self, req_ids: tuple[str, ...], ended: set[str], preempted: set[str], admitted: set[str]
    ) -> None:
        running = [req_id for req_id in req_ids if req_id not in admitted]
        unknown = [r for r in running if r not in self._row_of or r in ended]
        if unknown:
            raise UnknownRequestError(unknown, "scheduled")
        stopped = [r for r in running if r in preempted]
        if stopped:
            raise EngineDivergenceError(
                f"requests {stopped} are scheduled although they were preempted and not resumed"
            )
        if len(set(req_ids)) != len(req_ids):
            raise RowLayoutError(f"a request is scheduled twice in one step: {req_ids}")

    def _check_hit(self, request: AdmittedRequest) -> None:
        tokens, size = request.num_computed_tokens, self._block_size
        if tokens < 0 or tokens % size:
            raise HitSpanError(
                request.req_id, tokens, f"not a whole number of blocks of {size} tokens"
            )
        if len(request.block_ids) * size < tokens:
            raise HitSpanError(
                request.req_id,
                tokens,
                f"needs {tokens // size} blocks, its table has {len(request.block_ids)}",
            )
        bad = [b for b in request.block_ids if not 0 <= b < self._num_blocks]
        if bad:
            raise HitSpanError(
                request.req_id, tokens, f"block ids {bad[:8]} outside 0..{self._num_blocks - 1}"
            )

    def _spans(self, events: StepEvents, hits: list[tuple[AdmittedRequest, int]]) -> HitSpans:
        requests: list[int] = []
        first: list[int] = []
        end: list[int] = []
        block_base: list[int] = []
        blocks: list[int] = []
        for request, delivered in hits:
            tokens = request.num_computed_tokens
            if tokens == 0 and request.req_id not in events.req_ids:
                continue
            index = _scheduled_index(events, request)
            if delivered >= tokens:
                continue
            requests.append(index)
            first.append(delivered)
            end.append(tokens)
            block_base.append(len(blocks))
            blocks.extend(request.block_ids[: tokens // self._block_size])
        if not requests:
            return NO_SPANS
        starts = np.array(first, dtype=np.int64)
        lengths = np.array(end, dtype=np.int64) - starts
        positions = np.repeat(starts, lengths) + ranges(lengths)
        base = np.repeat(np.array(block_base, dtype=np.int64), lengths)
        block, offset = np.divmod(positions, self._block_size)
        block_ids = np.array(blocks, dtype=np.int64)[base + block]
        slots = block_ids * self._block_size + offset
        return HitSpans(np.array(requests, dtype=np.int64), starts, lengths, slots)

    # -- changing ---------------------------------------------------------------------------

    def apply(
        self, events: StepEvents, plan: RegistryPlan, step_id: int, oldest_unconsumed: int
    ) -> Int64Array:
        """Carry out a plan made from the same events, in the order of C1; cannot fail.

        `step_id` is the new step's; steps below `oldest_unconsumed` are over. Returns the owner
        row of each scheduled request.
        """
        if plan is UNCHANGED:
            return self._last_rows
        for req_id in events.ended_generations:
            self._end(req_id, step_id - 1)
        self._preempted.update(r for r in events.preempted if r in self._row_of)
        while self._retired and self._retired[0][0] < oldest_unconsumed:
            self._free_rows.append(self._retired.popleft()[1])
        for req_id in plan.fresh:
            self._start(req_id)
        self._preempted.difference_update(plan.returning)
        rows, req_ids = self._row_of, events.req_ids
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

    def _delivered(self, req_id: str) -> int:
        return int(self._delivered_end[self._row_of[req_id]])

    def _start(self, req_id: str) -> None:
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._row_of[req_id] = row
        self._saved_end[row] = 0
        self._delivered_end[row] = 0

    def _end(self, req_id: str, last_step: int) -> None:
        self._preempted.discard(req_id)
        row = self._row_of.pop(req_id, None)
        if row is not None:
            self._retired.append((last_step, row))

    def _grow(self) -> None:
        old = len(self._saved_end)
        more = max(16, old)
        zeros = np.zeros(more, dtype=np.int64)
        self._saved_end = np.concatenate((self._saved_end, zeros))
        self._delivered_end = np.concatenate((self._delivered_end, zeros))
        self._free_rows.extend(range(old + more - 1, old - 1, -1))


def _scheduled_index(events: StepEvents, request: AdmittedRequest) -> int:
    try:
        index = events.req_ids.index(request.req_id)
    except ValueError:
        raise HitSpanError(
            request.req_id, request.num_computed_tokens, "a hit of a request that is not scheduled"
        ) from None
    first = int(events.first_positions[index])
    if first != request.num_computed_tokens:
        raise HitSpanError(
            request.req_id,
            request.num_computed_tokens,
            f"its first scheduled position is {first}, not the end of the hit",
        )
    return index
