"""Hit rows + this step's rows → stage outputs, lazily per request (D1, D2).

One output buffer per key: the gather has filled in the pool's rows while the forward ran, the
rows of the step are copied behind them from the page, and requests are slices of it that are cut
only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from slotmirror.core.backend import Fence, HostRows
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import OutputBuffers, rows_tensor, rows_view
from slotmirror.core.device_outputs import DeviceOutputs
from slotmirror.core.events import Int64Array
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.layout import StepLayout
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.step import Step

Span: TypeAlias = tuple[int, int]
"""Positions `first … end - 1`."""

Payload = TypeVar("Payload", covariant=True)


class RequestIndex:
    """The requests of one call, by id; the dictionary is built when it is first needed."""

    def __init__(self, layout: StepLayout, req_ids: Sequence[str] | None) -> None:
        self.layout = layout
        self.req_ids = layout.req_ids if req_ids is None else tuple(req_ids)
        self._by_id: dict[str, int] | None = None

    def __getitem__(self, req_id: str) -> int:
        if self._by_id is None:
            wanted = set(self.req_ids)
            self._by_id = {r: i for i, r in enumerate(self.layout.req_ids) if r in wanted}
        return self._by_id[req_id]


class _ByRequest(Mapping[str, Payload]):
    """Common to the lazy mappings: the requests that they have, in the caller's order."""

    def __init__(self, index: RequestIndex, only: frozenset[str] | None = None) -> None:
        self._index = index
        self._only = only

    def _at(self, req_id: str) -> int:
        if self._only is not None and req_id not in self._only:
            raise KeyError(req_id)
        return self._index[req_id]

    def __iter__(self) -> Iterator[str]:
        only = self._only
        return (r for r in self._index.req_ids if only is None or r in only)

    def __len__(self) -> int:
        return len(self._index.req_ids) if self._only is None else len(self._only)


class RowsByRequest(_ByRequest[torch.Tensor]):
    """`req_id → tensor (rows, *trailing_shape)`: slices of one tensor, cut when asked for.

    A slice keeps the buffer of the whole step alive; clone what is kept for long.
    """

    def __init__(
        self,
        index: RequestIndex,
        base: torch.Tensor,
        starts: Int64Array,
        ends: Int64Array,
        only: frozenset[str] | None = None,
    ) -> None:
        super().__init__(index, only)
        self._base = base
        self._starts = starts
        self._ends = ends

    def __getitem__(self, req_id: str) -> torch.Tensor:
        i = self._at(req_id)
        return self._base[int(self._starts[i]) : int(self._ends[i])]


class SpansByRequest(_ByRequest[Span]):
    """`req_id → (first, end)`: the positions that its rows stand for."""

    def __init__(
        self,
        index: RequestIndex,
        first: Int64Array,
        ends: Int64Array,
        only: frozenset[str] | None = None,
    ) -> None:
        super().__init__(index, only)
        self._first = first
        self._ends = ends

    def __getitem__(self, req_id: str) -> Span:
        i = self._at(req_id)
        return int(self._first[i]), int(self._ends[i])


class SharedByRequest(_ByRequest[object]):
    """`req_id → payload`, the same payload for every request (whole leftovers)."""

    def __init__(self, index: RequestIndex, payload: object) -> None:
        super().__init__(index)
        self._payload = payload

    def __getitem__(self, req_id: str) -> object:
        self._at(req_id)
        return self._payload


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


class Merge:
    """One materialisation: fills the outputs of one step. Its page and gathers have arrived."""

    def __init__(
        self,
        step: Step,
        req_ids: Sequence[str] | None,
        buffers: OutputBuffers,
        device: DeviceOutputs | None = None,
    ) -> None:
        self._device = device
        self._arrival: Fence | None = None
        self._step = step
        self._layout = layout = StepLayout(step.events, step.hits, step.order)
        self._buffers = buffers
        self._index = RequestIndex(layout, req_ids)
        self._wanted = self._wanted_requests(req_ids)
        # A replay gives no position twice: its region is cut at what has been delivered (L2, L3).
        self._first = layout.region_first
        if len(step.replays):
            self._first = self._first.copy()
            replays = step.replays
            cut = np.minimum(step.delivered_before[replays], step.ends[replays])
            self._first[replays] = np.maximum(self._first[replays], cut)
        self._starts = layout.out_offsets + self._first - layout.region_first

    def _wanted_requests(self, req_ids: Sequence[str] | None) -> Int64Array | None:
        """Indices of the requested ones in page order; None for all of them."""
        if req_ids is None or tuple(req_ids) == self._layout.req_ids:
            return None
        return np.fromiter((self._index[r] for r in req_ids), np.int64, len(req_ids))

    def outputs(self) -> StageOutputs:
        """Copy the rows and wrap them."""
        layout, step = self._layout, self._step
        ends = layout.out_offsets + step.ends - layout.region_first
        rows: dict[str, Mapping[str, torch.Tensor]] = {}
        key_spans: dict[str, Mapping[str, Span]] = {}
        for key in step.saved_keys:
            base = self._sent(self._saved_rows(key))
            rows[key.spec.name] = RowsByRequest(self._index, base, self._starts, ends)
        for name, gather in step.gathers.items():
            if name in rows:
                continue
            present = step.hits.rows.present[:, gather.key.index]
            only = self._requests(step.hits.requests_with(present))
            hit_end = layout.out_offsets + layout.hit_lengths
            starts = np.minimum(self._starts, hit_end)
            base = self._sent(rows_tensor(gather.lease, gather.key.spec))
            rows[name] = RowsByRequest(self._index, base, starts, hit_end, only)
            first = np.minimum(self._first, layout.first)
            key_spans[name] = SpansByRequest(self._index, first, layout.first, only)
        hidden = rows.pop(HIDDEN_KEY, None)
        return StageOutputs(
            hidden_states=hidden,
            mm_outputs={**rows, **leftovers_by_request(self._index, self._step.leftovers)},
            spans=SpansByRequest(self._index, self._first, step.ends),
            key_spans=key_spans,
            arrival=self._arrival,
        )

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows where the caller wants them; the last fence is behind all copies."""
        if self._device is None:
            return rows
        copy, self._arrival = self._device.send(rows)
        return copy

    def delivered(self) -> tuple[Int64Array, Int64Array]:
        """The owners that got their rows, and the positions after them."""
        if self._wanted is None:
            return self._step.owners, self._step.ends
        return self._step.owners[self._wanted], self._step.ends[self._wanted]

    def _requests(self, indices: Int64Array) -> frozenset[str]:
        ids = self._layout.req_ids
        present = frozenset(ids[i] for i in indices.tolist())
        return present & frozenset(self._index.req_ids)

    def _saved_rows(self, key: OpenKey) -> torch.Tensor:
        """The key's output buffer, filled from the page; shape `(out_rows, *trailing_shape)`."""
        layout, spec, hits = self._layout, key.spec, self._step.hits
        gather = self._step.gathers.get(spec.name)
        lease = (
            gather.lease
            if gather is not None
            else self._buffers.lease(layout.out_rows * spec.row_bytes)
        )
        out = rows_view(lease, spec)
        if gather is None and len(hits):
            out[hits.out_rows] = np.zeros((), out.dtype)
        _, page_rows = key.pages[self._step.saved_page.index].first(layout.num_rows)
        self._copy_page_rows(page_rows, out)
        return rows_tensor(lease, spec)

    def _copy_page_rows(self, page_rows: HostRows, out: HostRows) -> None:
        for out_start, page_start, count in self._runs():
            out[out_start : out_start + count] = page_rows[page_start : page_start + count]
        if len(self._step.hits):
            out_index, page_index = self._layout.own_hits()
            if len(out_index):
                out[out_index] = page_rows[page_index]

    def _runs(self) -> list[tuple[int, int, int]]:
        """(output row, page row, rows) of every stretch that is contiguous in both."""
        layout = self._layout
        if self._wanted is None and not len(self._step.hits):
            return [(0, 0, layout.num_rows)]
        wanted = np.arange(len(layout.req_ids)) if self._wanted is None else self._wanted
        wanted = wanted[np.argsort(layout.page_offsets[wanted], kind="stable")]
        page = layout.page_offsets[wanted]
        out = layout.out_offsets[wanted] + layout.hit_lengths[wanted]
        counts = layout.counts[wanted]
        if not len(wanted):
            return []
        broken = (page[1:] != page[:-1] + counts[:-1]) | (out[1:] != out[:-1] + counts[:-1])
        heads = np.concatenate(([0], np.flatnonzero(broken) + 1))
        lengths = np.add.reduceat(counts, heads)
        return list(zip(out[heads].tolist(), page[heads].tolist(), lengths.tolist(), strict=True))


def leftovers_by_request(
    index: RequestIndex, pack: LeftoverPack | None
) -> dict[str, Mapping[str, object]]:
    """The leftovers of a step: tensors with the step's rows cut, everything else whole (D7)."""
    layout = index.layout
    starts = layout.page_offsets
    return {
        name: RowsByRequest(index, payload, starts, starts + layout.counts)
        if isinstance(payload, torch.Tensor)
        and payload.dim() >= 1
        and payload.shape[0] == layout.num_rows
        else SharedByRequest(index, payload)
        for name, payload in (pack.unpack() if pack is not None else {}).items()
    }
