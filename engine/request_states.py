"""What the runner knows of its live requests: tokens, block tables, images, upstream rows.

Kept from the scheduler's output, as every worker does that may run in another process than its
scheduler; what a scheduler does not carry (upstream rows, salts) is registered beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slotmirror.engine.errors import EngineError
from slotmirror.engine.models.base import Int64Array
from slotmirror.engine.scheduling.output import SchedulerOutput
from slotmirror.kvcache.request_params import MultimodalFeature


@dataclass(slots=True)
class RequestState:
    """One live request.

    token_ids      prompt and decoded tokens
    prefix_seed    uint64; isolates salts and stages (fingerprint model)
    upstream       (prompt tokens, width) hidden rows of the stage before, or None
    forced_tokens  decoded tokens of another run, taken instead of the model's own; or None
    """

    token_ids: list[int]
    prefix_seed: int
    upstream: torch.Tensor | None = None
    forced_tokens: Sequence[int] | None = None
    mm_features: Sequence[MultimodalFeature] = ()
    block_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    def append_decoded(self, token_id: int) -> int:
        """Append the model's next token, or the forced one; returns it."""
        if self.forced_tokens is not None:
            token_id = self.forced_tokens[len(self.token_ids) - self.num_prompt_tokens]
        self.token_ids.append(token_id)
        return token_id


class RequestStates:
    """All requests of one runner, registered and then live. Engine thread only.

    An id may be registered again while its aborted predecessor is still live.
    """

    def __init__(self) -> None:
        self._registered: dict[str, RequestState] = {}
        self._states: dict[str, RequestState] = {}

    def __getitem__(self, req_id: str) -> RequestState:
        """A live request."""
        return self._states[req_id]

    def register(self, req_id: str, state: RequestState) -> None:
        """Know a request before its first step."""
        self._registered[req_id] = state

    def withdraw(self, req_id: str) -> None:
        """Forget a request that may not have been scheduled yet."""
        self._registered.pop(req_id, None)

    def apply(self, output: SchedulerOutput) -> None:
        """Follow one scheduler step: forget ended requests; set, replace and extend tables."""
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            state = self._registered.pop(new.req_id, None)
            if state is None:
                raise EngineError(f"request {new.req_id!r} was scheduled but never registered")
            self._states[new.req_id] = state
            state.mm_features = new.mm_features
            (block_ids,) = new.block_ids
            state.block_ids = list(block_ids)
        cached = output.scheduled_cached_reqs
        for req_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._states[req_id]
            if req_id in cached.resumed_req_ids:
                state.block_ids = []
            if groups is not None:
                (block_ids,) = groups
                state.block_ids.extend(block_ids)


def block_tables(states: Sequence[RequestState]) -> Int64Array:
    """int64 (r, width), zero padded."""
    padded = np.zeros((len(states), max(len(s.block_ids) for s in states)), dtype=np.int64)
    for row, state in enumerate(states):
        padded[row, : len(state.block_ids)] = state.block_ids
    return padded
