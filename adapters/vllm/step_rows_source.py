"""Prefix caching is off: every step's rows are delivered as they are, nothing is kept (G1)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from slotmirror.adapters.stand_in import StepRowsOnly
from slotmirror.core.events import StepEvents
from slotmirror.core.merge import StageOutputs
from slotmirror.core.policy import ModelCachePolicy


class StepRowsForTwoThreads:
    """`StepRowsOnly`, which serves one thread at a time, between engine and delivery thread."""

    def __init__(self, policy: ModelCachePolicy) -> None:
        self._lock = threading.Lock()
        self._rows = StepRowsOnly(policy)

    def new_step_starts(self, events: StepEvents) -> None:
        """See `StepRowsOnly`; takes the lock, as all calls here."""
        with self._lock:
            self._rows.new_step_starts(events)

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, object],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int | None = None,
        req_ids: Sequence[str] | None = None,
    ) -> int:
        """See `StepRowsOnly`."""
        with self._lock:
            return self._rows.save_outputs(
                hidden,
                mm_outputs,
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
                req_ids=req_ids,
            )

    def materialize(self, step_id: int, req_ids: Sequence[str] | None = None) -> StageOutputs:
        """See `StepRowsOnly`."""
        with self._lock:
            return self._rows.materialize(step_id, req_ids)

    def discard_step(self, step_id: int) -> None:
        """See `StepRowsOnly`."""
        with self._lock:
            self._rows.discard_step(step_id)

    def reset(self) -> None:
        """See `StepRowsOnly`."""
        with self._lock:
            self._rows.reset()

    def shutdown(self) -> None:
        """See `StepRowsOnly`."""
        with self._lock:
            self._rows.shutdown()

    def stats(self) -> dict[str, object]:
        """Nothing is counted where nothing is kept."""
        return {}
