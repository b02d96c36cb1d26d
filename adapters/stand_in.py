"""The cache of a rank that keeps no rows (G3): each step is delivered as it is.

Tensor-parallel ranks hold replicas of the same rows, so one rank keeps them. On the others the
engine's calls must still work: this stand-in has them, keeps a host copy of each step until it is
consumed, and never merges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slotmirror.core.errors import CacheShutDownError, StepStateError, UnknownStepError
from slotmirror.core.events import Int64Array, StepEvents, offsets
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.layout import check_counts, check_shape, row_order
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.merge import (
    RequestIndex,
    StageOutputs,
    leftovers_by_request,
    rows_by_request,
    spans_by_request,
)
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.split import split_outputs


@dataclass(frozen=True, slots=True, eq=False)
class _KeptStep:
    events: StepEvents
    starts: Int64Array
    rows: dict[str, torch.Tensor]
    leftovers: LeftoverPack


class StepRowsOnly:
    """The calls of `PrefixCacheManager`, without a pool: hits deliver this step's rows alone.

    Copies are synchronous. One thread at a time; a dictionary is all its state.
    """

    def __init__(self, policy: ModelCachePolicy) -> None:
        self._policy = policy
        self._open: StepEvents | None = None
        self._steps: dict[int, _KeptStep] = {}
        self._last_id = 0
        self._closed = False

    def new_step_starts(self, events: StepEvents) -> None:
        """Note the step's layout; hits are ignored."""
        self._check_usable()
        check_shape(events)
        self._open = events

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, object],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int | None = None,
        req_ids: Sequence[str] | None = None,
    ) -> int:
        """Copy this step's outputs to the host; the same rules as the manager's."""
        self._check_usable()
        events = self._open
        if events is None:
            raise StepStateError("save_outputs without an open step: call new_step_starts first")
        padded = num_tokens_unpadded if num_tokens_padded is None else num_tokens_padded
        counts = (num_tokens_unpadded, padded)
        check_counts(events, *counts)
        starts = offsets(events.num_tokens, row_order(events, req_ids))
        kept, others = split_outputs(hidden, mm_outputs, counts, self._policy)
        rows = {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()}
        leftovers = LeftoverPack(others)
        arena = torch.empty(leftovers.num_bytes, dtype=torch.uint8, device="cpu")
        for source, destination in leftovers.copies_into(arena):
            destination.copy_(source)
        self._last_id += 1
        self._steps[self._last_id] = _KeptStep(events, starts, rows, leftovers)
        self._open = None
        return self._last_id

    def materialize(self, step_id: int, req_ids: Sequence[str] | None = None) -> StageOutputs:
        """This step's rows of these requests, all by default; consumes the step."""
        self._check_usable()
        kept = self._take(step_id)
        events, starts, counts = kept.events, kept.starts, kept.events.num_tokens
        index = RequestIndex(events.req_ids, req_ids)
        rows = {
            name: rows_by_request(index, tensor, starts, starts + counts)
            for name, tensor in kept.rows.items()
        }
        hidden = rows.pop(HIDDEN_KEY, None)
        return StageOutputs(
            hidden_states=hidden,
            mm_outputs={**rows, **leftovers_by_request(index, kept.leftovers, starts, counts)},
            spans=spans_by_request(index, events.first_positions, events.first_positions + counts),
            key_spans={},
        )

    def discard_step(self, step_id: int) -> None:
        """Consume a step without its rows."""
        self._check_usable()
        self._take(step_id)

    def reset(self) -> None:
        """Nothing is kept, so there is nothing to forget."""
        self._check_usable()

    def shutdown(self) -> None:
        """Drop everything; twice is harmless."""
        self._closed = True
        self._steps.clear()

    def _take(self, step_id: int) -> _KeptStep:
        kept = self._steps.pop(step_id, None)
        if kept is None:
            given_out = 0 < step_id <= self._last_id
            reason = "was already consumed" if given_out else "was never given out"
            raise UnknownStepError(step_id, reason, list(self._steps))
        return kept

    def _check_usable(self) -> None:
        if self._closed:
            raise CacheShutDownError("this cache was shut down; make a new one")
