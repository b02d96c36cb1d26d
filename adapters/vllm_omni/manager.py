"""vLLM-Omni's manager calls over `PrefixCacheManager`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slotmirror.adapters.devices import backend_for
from slotmirror.adapters.vllm.scheduler_events import SchedulerTranslator
from slotmirror.adapters.vllm_omni.interface import (
    ModelCachePolicy,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
    PrefixCacheConfig,
    StageCacheOutputs,
    core_config,
    core_policy,
)
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.errors import PrefixCacheError, WaitTimeoutError
from slotmirror.core.events import StepEvents
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.merge import StageOutputs
from slotmirror.core.registry import load_backend


class BatchOrder(Protocol):
    """Of a group view, what is read here."""

    def batch_req_ids(self) -> list[str]:
        """Requests in the order of their rows."""


@dataclass(frozen=True, slots=True)
class _SavedLayout:
    """Where each request's rows lie in a step's outputs: for leftovers."""

    rows: Mapping[str, tuple[int, int]]
    num_rows: int


class OmniPrefixCacheManager:
    """One stage's cache. Calls, threads and return values are those of the class it replaces.

    Differences that a caller can see: a resumed request gets the rows that were not delivered
    before, none twice; a recycled slot never gives another request's rows; errors are
    `OmniPrefixCacheUnmatchError` in every case, with slotmirror's error as their cause.
    """

    def __init__(
        self, config: PrefixCacheConfig, view: BatchOrder, *, eager: bool | None = None
    ) -> None:
        self._view = view
        self._policy = ModelCachePolicy()
        self._events = StepEvents()
        self._layouts: dict[int, _SavedLayout] = {}
        self._lock = threading.Lock()
        with _their_errors():
            core = core_config(config)
            self._translator = SchedulerTranslator(
                num_blocks=config.num_blocks, block_size=config.block_size
            )
            self._cache = PrefixCacheManager(core, _backend(view))
        self._registered = False

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """What the model needs, before the first step."""
        with _their_errors():
            self._cache.register_policy(core_policy(policy))
        self._policy, self._registered = policy, True

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Engine thread, once per real step, before finished requests are removed."""
        if not self._registered:
            self.register_policy(self._policy)
        with _their_errors():
            self._events = self._translator.translate(scheduler_output, {})
            self._cache.new_step_starts(self._events)

    def save_outputs(
        self,
        hidden_states: torch.Tensor | None,
        mm_outputs: dict[str, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int:
        """Take the step's outputs; the id is consumed by `materialize` or `discard_step`."""
        counts = dict(zip(self._events.req_ids, self._events.num_tokens.tolist(), strict=True))
        order = [req_id for req_id in self._view.batch_req_ids() if req_id in counts]
        with _their_errors():
            step_id = self._cache.save_outputs(
                hidden_states,
                mm_outputs or {},
                num_tokens_unpadded=num_tokens_unpadded,
                num_tokens_padded=num_tokens_padded,
                req_ids=order,
            )
        rows, first = {}, 0
        for req_id in order:
            rows[req_id] = (first, first + counts[req_id])
            first += counts[req_id]
        with self._lock:
            self._layouts[step_id] = _SavedLayout(rows, first)
        return step_id

    def materialize(self, step_id: int, req_ids: list[str]) -> StageCacheOutputs:
        """The merged outputs of these requests; any thread."""
        with _their_errors():
            outputs = self._cache.materialize(step_id, req_ids)
        with self._lock:
            layout = self._layouts.pop(step_id)
        hidden = None if outputs.hidden_states is None else dict(outputs.hidden_states)
        return StageCacheOutputs(hidden, _payloads(outputs, layout, req_ids))

    def discard_step(self, step_id: int) -> None:
        """Consume the step without its rows; any thread."""
        with _their_errors():
            self._cache.discard_step(step_id)
        with self._lock:
            self._layouts.pop(step_id, None)

    def shutdown(self) -> None:
        """End its thread and release its memory; twice is harmless."""
        self._cache.shutdown()


def _payloads(
    outputs: StageOutputs, layout: _SavedLayout, req_ids: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Key → request → payload. Keys that only the hit has are left out: they carry no span here."""
    return {
        key: {req_id: _of_request(by_request[req_id], layout, req_id) for req_id in req_ids}
        for key, by_request in outputs.mm_outputs.items()
        if key not in outputs.key_spans
    }


def _of_request(payload: Any, layout: _SavedLayout, req_id: str) -> Any:
    """A leftover's part for one request: nested tensors with the step's rows are cut.

    Tensors are copied, so that requests do not share what a consumer may write to.
    """
    if isinstance(payload, torch.Tensor):
        return payload
    if isinstance(payload, Mapping):
        return {key: _nested(value, layout, req_id) for key, value in payload.items()}
    return _nested(payload, layout, req_id)


def _nested(value: Any, layout: _SavedLayout, req_id: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() and len(value) == layout.num_rows:
            first, end = layout.rows[req_id]
            return value[first:end].contiguous()
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _nested(entry, layout, req_id) for key, entry in value.items()}
    if isinstance(value, list):
        return [item.clone() if isinstance(item, torch.Tensor) else item for item in value]
    return value


def _backend(view: BatchOrder) -> DeviceBackend:
    """By the stage's device; a view that does not say it gets the automatic choice."""
    device = getattr(view, "device", None)
    return backend_for(device) if isinstance(device, torch.device) else load_backend(None)


@contextmanager
def _their_errors() -> Iterator[None]:
    try:
        yield
    except WaitTimeoutError as error:
        raise OmniPrefixCacheStagingTimeoutError(str(error)) from error
    except PrefixCacheError as error:
        raise OmniPrefixCacheUnmatchError(str(error)) from error
