"""Hit rows + this step's rows → stage outputs, lazily per request (D1, D2).

One output buffer per key: the gather has filled in the pool's rows while the forward ran, the
rows of the step are copied behind them from the page, and requests are slices of it that are cut
only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from slotmirror.core.backend import Fence
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import OutputBuffers, rows_tensor, rows_view
from slotmirror.core.device_outputs import DeviceOutputs
from slotmirror.core.events import Int64Array, offsets
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.step import Step

Span: TypeAlias = tuple[int, int]
"""Positions `first … end - 1`."""
Run: TypeAlias = tuple[int, int, int]
"""Output row, page row, number of rows: a stretch that is contiguous in both."""

Payload = TypeVar("Payload", covariant=True)


class RequestIndex:
    """These requests' indices in a step, by id; the dictionary is built when it is first needed."""

    def __init__(self, step_ids: tuple[str, ...], req_ids: Sequence[str] | None) -> None:
        self.req_ids = step_ids if req_ids is None else tuple(dict.fromkeys(req_ids))
        self._step_ids = step_ids

    @cached_property
    def _by_id(self) -> dict[str, int]:
        wanted = set(self.req_ids)
        return {r: i for i, r in enumerate(self._step_ids) if r in wanted}

    def __getitem__(self, req_id: str) -> int:
        return self._by_id[req_id]

    @property
    def which(self) -> Int64Array | slice:
        """The indices; of all requests of the step, in its order, as a slice."""
        if self.req_ids is self._step_ids or self.req_ids == self._step_ids:
            return slice(None)
        return np.array([self[req_id] for req_id in self.req_ids], dtype=np.int64)


class ByRequest(Mapping[str, Payload]):
    """`req_id → payload` of these requests, in the caller's order; made when it is asked for."""

    def __init__(self, index: RequestIndex, payload: Callable[[int], Payload]) -> None:
        self._index = index
        self._payload = payload

    def __getitem__(self, req_id: str) -> Payload:
        return self._payload(self._index[req_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.req_ids)

    def __len__(self) -> int:
        return len(self._index.req_ids)

    def __reduce__(self) -> tuple[type[dict[str, object]], tuple[dict[str, Payload]]]:
        """To another process, or copied deeply, it goes as a plain dictionary."""
        return dict, (dict(self),)


def rows_by_request(
    index: RequestIndex, base: torch.Tensor, starts: Int64Array, ends: Int64Array
) -> ByRequest[torch.Tensor]:
    """`req_id → tensor (rows, *trailing_shape)`: slices of one tensor, cut when asked for.

    A slice keeps the buffer of the whole step alive; clone what is kept for long.
    """
    return ByRequest(index, lambda i: base[int(starts[i]) : int(ends[i])])


def spans_by_request(index: RequestIndex, first: Int64Array, ends: Int64Array) -> ByRequest[Span]:
    """`req_id → (first, end)`: the positions that its rows stand for."""
    return ByRequest(index, lambda i: (int(first[i]), int(ends[i])))


def leftovers_by_request(
    index: RequestIndex, pack: LeftoverPack | None, starts: Int64Array, counts: Int64Array
) -> dict[str, Mapping[str, object]]:
    """The leftovers of a step by name: tensors with the step's rows cut, all else whole (D7).

    `counts` (R,) are each request's rows, `starts` (R,) where they begin.
    """

    def by_request(payload: object) -> Mapping[str, object]:
        if isinstance(payload, torch.Tensor) and payload.shape[:1] == (counts.sum(),):
            return rows_by_request(index, payload, starts, starts + counts)
        return ByRequest(index, lambda _: payload)

    unpacked = {} if pack is None else pack.unpack()
    return {name: by_request(payload) for name, payload in unpacked.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StageOutputs:
    """What `materialize` returns; all mappings are lazy.

    hidden_states  req_id → (tokens, D), or None where the policy opts out
    mm_outputs     key → req_id → payload: rows, a leftover's slice, or a whole leftover
    spans          req_id → (first, end): the positions that the rows stand for
    key_spans      the same, for keys of which only the hit rows exist in this step (D6)
    arrival        with `device=True`: the fence behind the copies; let your stream wait for it
    """

    hidden_states: Mapping[str, torch.Tensor] | None
    mm_outputs: dict[str, Mapping[str, object]]
    spans: Mapping[str, Span]
    key_spans: dict[str, Mapping[str, Span]]
    arrival: Fence | None = None


def merge_outputs(
    step: Step, index: RequestIndex, buffers: OutputBuffers, device: DeviceOutputs | None
) -> StageOutputs:
    """Copy the step's rows and wrap those of the requests in `index`.

    The step's page and its gathers have arrived.
    """
    events, ends, own_first = step.events, step.ends, step.events.first_positions
    page_offsets = offsets(events.num_tokens, step.order)
    first = step.hits.spans.first_delivered(events)
    if len(step.replays):
        # A replay gives no position twice: its region is cut at what has been delivered (L2, L3).
        # Nobody else's is: what was saved before, and so delivered, ends where it begins.
        first = np.maximum(first, np.minimum(step.delivered_before, ends))
    row_of_0 = step.hits.row_of_position_0(events, page_offsets)
    starts, stops = first + row_of_0, ends + row_of_0
    rows: dict[str, Mapping[str, torch.Tensor]] = {}
    key_spans: dict[str, Mapping[str, Span]] = {}
    arrival: Fence | None = None

    def sent(base: torch.Tensor) -> torch.Tensor:
        nonlocal arrival
        if device is not None:
            # The last fence is behind all copies.
            base, arrival = device.send(base)
        return base

    runs = _runs(step, index.which, page_offsets, row_of_0)
    for key in step.saved_keys:
        base = sent(_saved_rows(step, key, runs, buffers))
        rows[key.name] = rows_by_request(index, base, starts, stops)
    for name, gather in step.gathers.items():
        if name not in rows:
            found = {events.req_ids[i] for i in step.hits.requests_with(gather.key.index).tolist()}
            only = RequestIndex(events.req_ids, [r for r in index.req_ids if r in found])
            base = sent(rows_tensor(gather.lease, gather.key.spec))
            hit_first = np.minimum(first, own_first)
            hit_rows = hit_first + row_of_0, own_first + row_of_0
            rows[name] = rows_by_request(only, base, *hit_rows)
            key_spans[name] = spans_by_request(only, hit_first, own_first)
    leftovers = leftovers_by_request(index, step.leftovers, page_offsets, events.num_tokens)
    return StageOutputs(
        hidden_states=rows.pop(HIDDEN_KEY, None),
        mm_outputs={**rows, **leftovers},
        spans=spans_by_request(index, first, ends),
        key_spans=key_spans,
        arrival=arrival,
    )


def _saved_rows(
    step: Step, key: OpenKey, runs: Sequence[Run], buffers: OutputBuffers
) -> torch.Tensor:
    """The key's output buffer, filled from the page; shape `(out_rows, *trailing_shape)`."""
    spec, hits, num_rows = key.spec, step.hits, step.events.total_tokens
    _, page_rows = key.pages[step.page.index].first(num_rows)
    gather = step.gathers.get(spec.name)
    num_bytes = (num_rows + len(hits)) * spec.row_bytes
    lease = buffers.lease(num_bytes) if gather is None else gather.lease
    out = rows_view(lease, spec)
    if len(hits):
        if gather is None:
            out[hits.out_rows] = np.zeros((), out.dtype)
        own_out, own_page = hits.own_rows(step.events, step.order)
        out[own_out] = page_rows[own_page]
    for out_start, page_start, count in runs:
        out[out_start : out_start + count] = page_rows[page_start : page_start + count]
    return rows_tensor(lease, spec)


def _runs(
    step: Step, which: Int64Array | slice, page_offsets: Int64Array, row_of_0: Int64Array
) -> list[Run]:
    """Computed rows of these requests, in stretches; both arrays are (R,)."""
    if isinstance(which, slice) and not len(step.hits):
        return [(0, 0, step.events.total_tokens)]
    indices = np.arange(len(page_offsets))[which]
    indices = indices[np.argsort(page_offsets[indices])]
    page, counts = page_offsets[indices], step.events.num_tokens[indices]
    out = (step.events.first_positions + row_of_0)[indices]
    is_head = np.ones(len(indices), dtype=np.bool_)
    is_head[1:] = (np.diff(page) != counts[:-1]) | (np.diff(out) != counts[:-1])
    heads = np.flatnonzero(is_head)
    lengths = np.add.reduceat(counts, heads)
    return list(zip(out[heads].tolist(), page[heads].tolist(), lengths.tolist(), strict=True))
