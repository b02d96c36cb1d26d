"""Rows of many steps → rows of whole requests, by position. One thread, no lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from slotmirror.adapters.delivery.request_rows import HIDDEN_STATES, RequestRows
from slotmirror.core.merge import StageOutputs


class RowRun:
    """One key of one request: a contiguous run of positions that grows at its end."""

    def __init__(self, first: int, like: torch.Tensor, capacity: int) -> None:
        self.first = first
        self.end = first
        self._buffer = torch.empty((max(capacity - first, 1), *like.shape[1:]), dtype=like.dtype)

    def put(self, first: int, rows: torch.Tensor) -> bool:
        """Write rows of positions `first …`; False, and nothing written, if that leaves a gap.

        Positions that are here already are overwritten: an engine that computes them again has
        the better rows (rejected drafts, replays without a cache).
        """
        if first > self.end:
            return False
        rows = rows[max(self.first - first, 0) :]
        start = max(first, self.first) - self.first
        end = start + len(rows)
        if end > len(self._buffer):
            self._grow(end)
        self._buffer[start:end] = rows
        self.end = max(self.end, self.first + end)
        return True

    def rows(self, end: int) -> torch.Tensor:
        """Rows up to position `end`; the caller's own once the run is dropped."""
        return self._buffer[: max(min(end, self.end) - self.first, 0)]

    def _grow(self, needed: int) -> None:
        size = max(needed, 2 * len(self._buffer))
        wider = torch.empty((size, *self._buffer.shape[1:]), dtype=self._buffer.dtype)
        wider[: self.end - self.first] = self._buffer[: self.end - self.first]
        self._buffer = wider


@dataclass(slots=True)
class _Pending:
    num_prompt_tokens: int
    runs: dict[str, RowRun] = field(default_factory=dict)
    broken: bool = False


class RequestAssembler:
    """Collects what steps deliver until a request is whole.

    `prompt_only`: a request is whole when its prompt is, and only the prompt's rows are kept;
    otherwise it is whole when it ends, with the rows of every position that was computed.
    """

    def __init__(self, *, prompt_only: bool) -> None:
        self._prompt_only = prompt_only
        self._pending: dict[str, _Pending] = {}
        self.requests_incomplete = 0
        """Requests that ended, or were spoilt, before their prompt was whole."""

    def begin(self, req_id: str, num_prompt_tokens: int) -> None:
        """A request starts; one of the same id that is pending is incomplete."""
        if req_id in self._pending:
            self.requests_incomplete += 1
        self._pending[req_id] = _Pending(num_prompt_tokens)

    def wants(self, req_ids: Iterable[str]) -> list[str]:
        """Those among `req_ids` whose rows are still to be collected."""
        pending = self._pending
        return [req_id for req_id in req_ids if req_id in pending and not pending[req_id].broken]

    def spoil(self, req_ids: Iterable[str]) -> None:
        """Rows of these requests are lost: they will not be handed out."""
        for req_id in req_ids:
            entry = self._pending.get(req_id)
            if entry is not None:
                entry.broken = True
                entry.runs.clear()

    def add(
        self, outputs: StageOutputs, accepted_ends: Mapping[str, int] | None = None
    ) -> list[RequestRows]:
        """Take one step's rows; returns the requests that became whole with them.

        `accepted_ends` cuts the rows of requests with rejected drafts (L7).
        """
        accepted_ends = accepted_ends or {}
        for req_id in outputs.spans:
            entry = self._pending.get(req_id)
            if entry is not None and not entry.broken:
                self._add(req_id, entry, outputs, accepted_ends.get(req_id))
        if not self._prompt_only:
            return []
        whole = [r for r in outputs.spans if r in self._pending and self._is_whole(r)]
        return [self._take(req_id) for req_id in whole]

    def end(self, req_ids: Iterable[str]) -> list[RequestRows]:
        """These requests ended; returns those that are whole, the others are incomplete."""
        done = []
        for req_id in req_ids:
            if req_id not in self._pending:
                continue
            if self._is_whole(req_id):
                done.append(self._take(req_id))
            else:
                del self._pending[req_id]
                self.requests_incomplete += 1
        return done

    def end_all(self) -> list[RequestRows]:
        """Every request ended: the engine is idle."""
        return self.end(list(self._pending))

    def _add(
        self, req_id: str, entry: _Pending, outputs: StageOutputs, accepted_end: int | None
    ) -> None:
        keys: dict[str, Mapping[str, object]] = dict(outputs.mm_outputs)
        if outputs.hidden_states is not None:
            keys[HIDDEN_STATES] = outputs.hidden_states
        for key, by_request in keys.items():
            spans = outputs.key_spans.get(key, outputs.spans)
            rows = by_request.get(req_id)
            if req_id in spans and isinstance(rows, torch.Tensor):
                first, end = spans[req_id]
                # Anything else is a leftover of the step, not rows by position.
                if len(rows) == end - first:
                    if accepted_end is not None:
                        rows = rows[: max(accepted_end - first, 0)]
                    self._put(entry, key, first, rows)

    def _put(self, entry: _Pending, key: str, first: int, rows: torch.Tensor) -> None:
        limit = entry.num_prompt_tokens
        if self._prompt_only:
            rows = rows[: max(limit - first, 0)]
        if not len(rows):
            return
        run = entry.runs.get(key)
        if run is None:
            run = entry.runs[key] = RowRun(first, rows, max(limit, first + len(rows)))
        if not run.put(first, rows):
            entry.broken = True

    def _is_whole(self, req_id: str) -> bool:
        entry = self._pending[req_id]
        if entry.broken or not entry.runs:
            return False
        run = entry.runs.get(HIDDEN_STATES, next(iter(entry.runs.values())))
        return run.first == 0 and run.end >= entry.num_prompt_tokens

    def _take(self, req_id: str) -> RequestRows:
        entry = self._pending.pop(req_id)
        return RequestRows(
            req_id,
            entry.num_prompt_tokens,
            {key: run.rows(run.end) for key, run in entry.runs.items()},
            {key: run.first for key, run in entry.runs.items()},
        )
