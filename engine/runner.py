"""The model runner of one stage: a scheduler's step in, output rows and sampled tokens out.

Rows are written into buffers that the next step overwrites, padded to whole multiples of
`PADDING_TOKENS`, like an engine that replays captured graphs: whoever keeps rows must copy them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.engine.encoder_outputs import EncoderOutputs
from slotmirror.engine.models.base import HIDDEN_KEY, StageModel
from slotmirror.engine.request_states import RequestState, RequestStates
from slotmirror.engine.scheduling.output import SchedulerOutput
from slotmirror.engine.step_batches import make_batch

PADDING_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """One executed step of n tokens.

    ends         request → position behind its last token of the step, in batch order
    hidden       (num_tokens_padded, width), valid until the next step
    mm_outputs   per-token outputs (n or num_tokens_padded rows), valid as long, and leftovers
    sampled      the next token of each request whose last known token was computed
    """

    ends: dict[str, int]
    num_tokens: int
    num_tokens_padded: int
    hidden: torch.Tensor
    mm_outputs: Mapping[str, object]
    sampled: Mapping[str, int]


class Runner:
    """Executes the steps of one stage. Engine thread only."""

    def __init__(self, model: StageModel, *, block_size: int, max_batched_tokens: int) -> None:
        self._model = model
        self._block_size = block_size
        self._states = RequestStates()
        self._encoder = EncoderOutputs(model)
        self._buffers = {
            key: torch.zeros(
                (_padded(max_batched_tokens), *spec.trailing_shape),
                dtype=spec.dtype,
                device=model.device,
            )
            for key, spec in model.outputs.items()
        }

    @property
    def encoder_calls(self) -> int:
        return self._encoder.num_calls

    def register(self, req_id: str, state: RequestState) -> None:
        """Know a request before the scheduler first names it."""
        self._states.register(req_id, state)

    def withdraw(self, req_id: str) -> None:
        """Forget an aborted request, if no step has named it; else the next step's output does."""
        self._states.withdraw(req_id)

    def decoded_tokens(self, req_id: str) -> tuple[int, ...]:
        """What a request has decoded; known until the step after its last."""
        state = self._states[req_id]
        return tuple(state.token_ids[state.num_prompt_tokens :])

    def execute(self, output: SchedulerOutput) -> ExecutedStep | None:
        """Run one step; None for a step without tokens, which only ends requests."""
        self._states.apply(output)
        self._encoder.free(output.free_encoder_mm_hashes)
        if not output.total_num_scheduled_tokens:
            return None
        for req_id, indices in output.scheduled_encoder_inputs.items():
            features = self._states[req_id].mm_features
            self._encoder.encode(features[index] for index in indices)
        req_ids = tuple(output.num_scheduled_tokens)
        states = [self._states[req_id] for req_id in req_ids]
        batch = make_batch(output, states, self._encoder, self._block_size)
        result = self._model.forward(batch, self._buffers)
        padded = _padded(batch.num_tokens)
        rows = {
            key: self._buffers[key][: padded if spec.padded else batch.num_tokens]
            for key, spec in self._model.outputs.items()
        }
        return ExecutedStep(
            ends=dict(zip(req_ids, (batch.positions[batch.last_rows] + 1).tolist(), strict=True)),
            num_tokens=batch.num_tokens,
            num_tokens_padded=padded,
            hidden=rows.pop(HIDDEN_KEY),
            mm_outputs={**rows, **result.leftovers},
            sampled={
                req_ids[index]: states[index].append_decoded(int(result.next_tokens[index]))
                for index in np.flatnonzero(batch.samples).tolist()
            },
        )


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // PADDING_TOKENS) * PADDING_TOKENS
