"""From materialised steps to whole request outputs; runs on a stage's builder thread."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.engine.errors import EngineError
from slotmirror.engine.models.base import HIDDEN_KEY
from slotmirror.engine.stage_output import Leftover, RowCollector, StageOutput


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request whose last step this is."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepJob:
    """What one engine step leaves to the builder.

    step_id   of the saved outputs; None for a step without tokens
    ends      request → position behind its last token of this step, batch order
    admitted  requests seen for the first time, with the rows they will have in all
    aborted   requests whose rows nobody wants any more
    """

    step_id: int | None
    ends: dict[str, int]
    admitted: tuple[tuple[str, int], ...]
    finished: tuple[FinishedRequest, ...]
    aborted: tuple[str, ...]


class OutputAssembler:
    """Materialises steps and collects every request's rows by position. Builder thread only.

    row_keys: the stage's per-token outputs; any other key is a leftover list with one tensor per
    request of the step.
    """

    def __init__(
        self, cache: PrefixCacheManager, backend: DeviceBackend, row_keys: frozenset[str]
    ) -> None:
        self._cache = cache
        self._backend = backend
        self._row_keys = row_keys
        self._collectors: dict[str, RowCollector] = {}
        self._finished: dict[str, StageOutput] = {}

    def build(self, job: StepJob) -> None:
        """Deliver one step's rows to its requests, and complete those that end with it."""
        for req_id in job.aborted:
            self._collectors.pop(req_id, None)
        for req_id, num_rows in job.admitted:
            self._collectors[req_id] = RowCollector(req_id, num_rows)
        if job.step_id is not None:
            self._deliver(job.step_id, job.ends)
        for done in job.finished:
            self._finished[done.req_id] = self._collectors.pop(done.req_id).finish(
                done.prompt_token_ids, done.output_token_ids
            )

    def discard(self, job: StepJob) -> None:
        """Give the step's page back undelivered."""
        if job.step_id is not None:
            self._cache.discard_step(job.step_id)

    def take(self, req_id: str) -> StageOutput:
        """The output of a finished request, once. Any thread, after its last job was built."""
        return self._finished.pop(req_id)

    def _deliver(self, step_id: int, ends: dict[str, int]) -> None:
        self._backend.bind_thread(self._backend.device)
        outputs = self._cache.materialize(step_id, list(ends))
        per_key = dict(outputs.mm_outputs)
        if outputs.hidden_states is not None:
            per_key[HIDDEN_KEY] = outputs.hidden_states
        for key, payloads in per_key.items():
            if key not in self._row_keys:
                self._keep_leftovers(key, payloads, ends)
                continue
            spans = outputs.key_spans.get(key, outputs.spans)
            for req_id, rows in payloads.items():
                if not isinstance(rows, torch.Tensor):
                    raise EngineError(f"step {step_id}: {key!r} of {req_id!r} is not a tensor")
                first, end = spans[req_id]
                self._collectors[req_id].add(key, first, end, rows)

    def _keep_leftovers(
        self, key: str, payloads: Mapping[str, object], ends: Mapping[str, int]
    ) -> None:
        for index, (req_id, end) in enumerate(ends.items()):
            items = payloads[req_id]
            if not (isinstance(items, list) and len(items) == len(ends)):
                raise EngineError(f"leftover {key!r} is not a list of {len(ends)} tensors")
            # A slice of the step's own copy would keep all of it alive.
            leftover = Leftover(key, end - 1, items[index].clone())
            self._collectors[req_id].leftovers.append(leftover)
