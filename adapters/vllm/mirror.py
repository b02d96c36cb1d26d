"""One worker's mirror: a step's life from the scheduler's output to the sink.

Engine thread only; it knows vLLM's objects by attribute and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from slotmirror.adapters.delivery.delivery import Delivery, Order, SavedStep, StepSource
from slotmirror.adapters.vllm.layer_rows import LayerRows
from slotmirror.adapters.vllm.scheduler_events import (
    SchedulerOutput,
    SchedulerTranslator,
    accepted_positions,
    num_prompt_tokens,
)
from slotmirror.adapters.vllm.slot_guard import check_slots
from slotmirror.core.errors import EngineDivergenceError
from slotmirror.core.events import StepEvents


class StageCache(StepSource, Protocol):
    """The calls that are common to `PrefixCacheManager` and `StepRowsOnly`."""

    def new_step_starts(self, events: StepEvents) -> None:
        """See `PrefixCacheManager`."""

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, object],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int | None = None,
        req_ids: Sequence[str] | None = None,
    ) -> int:
        """See `PrefixCacheManager`."""

    def reset(self) -> None:
        """See `PrefixCacheManager`."""

    def stats(self) -> dict[str, object]:
        """See `PrefixCacheManager`."""

    def shutdown(self) -> None:
        """See `PrefixCacheManager`."""


class StageMirror:
    """Feeds one cache with what a worker's engine does, and one delivery with its steps."""

    def __init__(
        self,
        cache: StageCache,
        translator: SchedulerTranslator,
        delivery: Delivery,
        layers: LayerRows,
        *,
        debug_slots: bool = False,
    ) -> None:
        self.cache = cache
        self.delivery = delivery
        self._translator = translator
        self._layers = layers
        self._debug_slots = debug_slots
        self._events: StepEvents | None = None
        self._output: SchedulerOutput | None = None
        self._num_drafts = 0
        self._num_rejected = 0
        self._live: set[str] = set()
        self._verified: dict[str, int] = {}
        self._drafted: SavedStep | None = None

    def step_starts(self, output: SchedulerOutput) -> None:
        """Before the forward of a real step, or of a step that only ends requests (L6)."""
        events = self._translator.translate(output, self._verified)
        self._start(events)
        self._live.difference_update(events.ended)
        # A live id among the new ones is a resume or a continuation (L1): it has begun already.
        begun = tuple(
            (request.req_id, num_prompt_tokens(request))
            for request in output.scheduled_new_reqs
            if request.req_id not in self._live
        )
        self._live.update(req_id for req_id, _ in begun)
        if events.ended or begun:
            self.delivery.post(Order(ended=events.ended, begun=begun))
        if events.total_tokens:
            self._events, self._output = events, output
            self._layers.start()

    def forward_done(self, state: Any, runner: Any) -> None:
        """After the forward, before sampling: `state` is the runner's execute-model state."""
        events = self._events
        if events is None:
            return
        rows = self._layers.stop()
        hidden = getattr(state, "hidden_states", None)
        if not isinstance(hidden, torch.Tensor):
            raise EngineDivergenceError(
                f"the engine ran {events.total_tokens} tokens and left no hidden states behind "
                f"(state: {type(state).__name__}); slotmirror cannot serve this stage"
            )
        order = row_order(state, runner)
        if self._debug_slots:
            check_slots(events, order, engine_slots(state), events.total_tokens)
        step_id = self.cache.save_outputs(
            hidden,
            rows,
            num_tokens_unpadded=events.total_tokens,
            num_tokens_padded=len(hidden),
            req_ids=order,
        )
        step = SavedStep(step_id, events.req_ids)
        if events.drafted:
            self._drafted = step
            return
        self._events = self._output = None
        self.delivery.post(Order(step=step))

    def sampled(self, result: Any) -> None:
        """After sampling: what was accepted of the step's drafts (L7)."""
        if self._events is None or self._output is None or self._drafted is None:
            return
        tokens = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        self._verified = accepted_positions(self._events, self._output, tokens)
        self._count_drafts(self._events, self._output)
        self._events = self._output = None

    def flush(self, timeout_s: float, *, end_requests: bool = False) -> None:
        """Deliver what is saved, the last drafts included; `end_requests`: the engine is idle."""
        self._settle()
        if end_requests:
            self.delivery.post(Order(end_all=True))
        self.delivery.flush(timeout_s)

    def stats(self) -> dict[str, object]:
        """Counters of cache, delivery and sink."""
        drafts = {"accepted": self._num_drafts - self._num_rejected, "rejected": self._num_rejected}
        return {"cache": self.cache.stats(), "drafts": drafts, **self.delivery.counters()}

    def reset(self) -> None:
        """Weights changed or the engine slept: rows of before are never served again (R1)."""
        self.cache.reset()

    def shutdown(self, timeout_s: float) -> None:
        """Deliver what can be within `timeout_s`, then end all threads; twice is harmless."""
        self._layers.remove()
        try:
            self._settle()
        finally:
            self.delivery.close(timeout_s)
            self.cache.shutdown()

    def _count_drafts(self, events: StepEvents, output: SchedulerOutput) -> None:
        ends = dict(
            zip(events.req_ids, (events.first_positions + events.num_tokens).tolist(), strict=True)
        )
        for req_id, accepted in self._verified.items():
            self._num_drafts += len(output.scheduled_spec_decode_tokens[req_id])
            self._num_rejected += ends[req_id] - accepted

    def _settle(self) -> None:
        """A step without requests verifies the drafts of the last one."""
        if self._drafted is not None:
            self._start(StepEvents(verified_positions=self._verified))

    def _start(self, events: StepEvents) -> None:
        """Begin a step; the drafted step before it is verified with that and can be consumed."""
        self._events = self._output = None
        self.cache.new_step_starts(events)
        drafted, self._drafted = self._drafted, None
        accepted, self._verified = self._verified, {}
        if drafted is not None:
            step = SavedStep(drafted.step_id, drafted.req_ids, accepted)
            self.delivery.post(Order(step=step))


def row_order(state: Any, runner: Any) -> list[str]:
    """The order of requests in the runner's rows: V2 has it in its state, V1 in its batch."""
    batch = getattr(state, "input_batch", None)
    if batch is None:
        batch = runner.input_batch
    return list(batch.req_ids)


def engine_slots(state: Any) -> object:
    """The runner's slot mapping of this step, by layer."""
    slots = getattr(state, "slot_mappings", None)
    return getattr(state, "slot_mappings_by_layer", None) if slots is None else slots
