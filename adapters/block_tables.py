"""The mirror of the engine's block tables, rebuilt from its scheduler's output alone (K3).

Every adapter turns its engine's step into `StepEvents` through one of these; no device tensor is
ever read back. One pass over the scheduler's dictionaries, then a fixed number of array calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from slotmirror.core.errors import ConfigError, RowLayoutError, UnknownRequestError
from slotmirror.core.events import AdmittedRequest, Int64Array, StepEvents, ranges

NO_BLOCK = -1


class BlockTables:
    """Block tables of all live requests, as one array; one thread, no locks.

    `num_blocks` and `block_size` as in `PrefixCacheConfig`.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        for field, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(field, value, "must be at least 1")
        self._block_size = block_size
        self._tables = np.full((16, 16), NO_BLOCK, dtype=np.int64)
        self._lengths: list[int] = [0] * 16
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(15, -1, -1))
        self._last_ids: tuple[str, ...] | None = None
        self._last_rows: Int64Array = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Live requests that hold a table."""
        return len(self._rows)

    def step(
        self,
        *,
        num_scheduled_tokens: Mapping[str, int],
        num_computed_tokens: Mapping[str, int],
        ended: Iterable[str] = (),
        preempted: Iterable[str] = (),
        new: Sequence[AdmittedRequest] = (),
        resumed: Sequence[AdmittedRequest] = (),
        appended: Mapping[str, Sequence[int]] | None = None,
        replaced: Iterable[str] = (),
        drafted: Iterable[str] = (),
        verified_positions: Mapping[str, int] | None = None,
    ) -> StepEvents:
        """Apply one step of the scheduler and return it as events.

        num_scheduled_tokens  tokens per scheduled request, in batch order
        num_computed_tokens   the first position of each of them (more entries do no harm)
        appended              further block ids of running requests
        the rest              as in `StepEvents`

        A token whose block is unknown gets slot -1, which the manager refuses with the request's
        name. Raises `UnknownRequestError` for a scheduled or appended request that is neither live
        nor admitted here, `RowLayoutError` for one without a first position; nothing changes then.
        """
        ended, preempted = tuple(ended), tuple(preempted)
        appended = appended or {}
        req_ids = tuple(num_scheduled_tokens)
        unplaced = [req_id for req_id in req_ids if req_id not in num_computed_tokens]
        if unplaced:
            raise RowLayoutError(f"scheduled without an entry in num_computed_tokens: {unplaced}")
        self._check_known(req_ids, appended, new, resumed, {*ended, *preempted})
        for req_id in (*ended, *preempted):
            self._drop(req_id)
        for admitted in (*new, *resumed):
            self._drop(admitted.req_id)
            self._extend(admitted.req_id, admitted.block_ids)
        for req_id, block_ids in appended.items():
            self._extend(req_id, block_ids)
        count = len(req_ids)
        num_tokens = np.fromiter(num_scheduled_tokens.values(), np.int64, count)
        first = np.fromiter((num_computed_tokens[r] for r in req_ids), np.int64, count)
        return StepEvents(
            ended=ended,
            preempted=preempted,
            new=tuple(new),
            resumed=tuple(resumed),
            replaced=tuple(replaced),
            drafted=tuple(drafted),
            verified_positions=verified_positions or {},
            req_ids=req_ids,
            first_positions=first,
            num_tokens=num_tokens,
            slots=self._slots(self._rows_of(req_ids), first, num_tokens),
        )

    def _check_known(
        self,
        req_ids: tuple[str, ...],
        appended: Mapping[str, Sequence[int]],
        new: Sequence[AdmittedRequest],
        resumed: Sequence[AdmittedRequest],
        dropped: set[str],
    ) -> None:
        admitted = {request.req_id for request in (*new, *resumed)}
        unknown = [
            req_id
            for req_id in dict.fromkeys((*req_ids, *appended))
            if req_id not in admitted and (req_id not in self._rows or req_id in dropped)
        ]
        if unknown:
            raise UnknownRequestError(unknown, "scheduled without a block table")

    def _rows_of(self, req_ids: tuple[str, ...]) -> Int64Array:
        # A steady decode batch names the same requests step after step.
        if req_ids != self._last_ids:
            rows = self._rows
            self._last_rows = np.fromiter((rows[r] for r in req_ids), np.int64, len(req_ids))
            self._last_ids = req_ids
        return self._last_rows

    def _slots(self, rows: Int64Array, first: Int64Array, num_tokens: Int64Array) -> Int64Array:
        positions = np.repeat(first, num_tokens) + ranges(num_tokens)
        index, offset = np.divmod(positions, self._block_size)
        beyond = index >= self._tables.shape[1]
        blocks = self._tables[np.repeat(rows, num_tokens), np.where(beyond, 0, index)]
        blocks[beyond] = NO_BLOCK
        return np.where(blocks == NO_BLOCK, -1, blocks * self._block_size + offset)

    def _drop(self, req_id: str) -> None:
        row = self._rows.pop(req_id, None)
        if row is None:
            return
        self._tables[row] = NO_BLOCK
        self._lengths[row] = 0
        self._free_rows.append(row)
        self._last_ids = None

    def _extend(self, req_id: str, block_ids: Sequence[int]) -> None:
        row = self._rows.get(req_id)
        if row is None:
            if not self._free_rows:
                self._grow_rows()
            row = self._rows[req_id] = self._free_rows.pop()
            self._last_ids = None
        start = self._lengths[row]
        end = start + len(block_ids)
        if end > self._tables.shape[1]:
            self._grow_columns(end)
        self._tables[row, start:end] = block_ids
        self._lengths[row] = end

    def _grow_rows(self) -> None:
        old = len(self._tables)
        more = np.full((old, self._tables.shape[1]), NO_BLOCK, dtype=np.int64)
        self._tables = np.concatenate((self._tables, more))
        self._lengths.extend([0] * old)
        self._free_rows.extend(range(2 * old - 1, old - 1, -1))

    def _grow_columns(self, needed: int) -> None:
        rows, old = self._tables.shape
        more = np.full((rows, max(needed, 2 * old) - old), NO_BLOCK, dtype=np.int64)
        self._tables = np.concatenate((self._tables, more), axis=1)
