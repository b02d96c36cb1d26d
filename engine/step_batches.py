"""From the scheduler's output and the live requests to the model's step batch."""

from collections.abc import Sequence

import numpy as np
import torch

from slotmirror.engine.encoder_outputs import EncoderOutputs
from slotmirror.engine.models.base import Int64Array, StepBatch
from slotmirror.engine.request_states import RequestState, block_tables
from slotmirror.engine.scheduling.output import SchedulerOutput


def make_batch(
    output: SchedulerOutput,
    states: Sequence[RequestState],
    encoder: EncoderOutputs,
    block_size: int,
) -> StepBatch:
    """The batch of one step; `states` in the order of `output.num_scheduled_tokens`.

    `output` has been applied to the states: their tables cover the step.
    """
    counts = np.fromiter(output.num_scheduled_tokens.values(), dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    firsts = _first_positions(output)
    ends = firsts + counts
    owners = np.repeat(np.arange(len(states)), counts)
    positions = np.arange(offsets[-1]) + np.repeat(firsts - offsets[:-1], counts)
    tables = block_tables(states)
    blocks = tables[owners, positions // block_size]
    spans = list(zip(states, firsts.tolist(), ends.tolist(), strict=True))
    embedded_rows, embeddings = _embeddings(spans, offsets, encoder)
    token_ids = [token for state, first, end in spans for token in state.token_ids[first:end]]
    return StepBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        offsets=offsets,
        block_tables=tables,
        prefix_seeds=np.array([state.prefix_seed for state in states], dtype=np.uint64),
        samples=ends == np.array([len(state.token_ids) for state in states]),
        embedded_rows=embedded_rows,
        embeddings=embeddings,
        upstream=_upstream(spans, offsets, encoder.device),
    )


def _first_positions(output: SchedulerOutput) -> Int64Array:
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    return np.array([computed[req_id] for req_id in output.num_scheduled_tokens], dtype=np.int64)


Spans = Sequence[tuple[RequestState, int, int]]


def _embeddings(
    spans: Spans, offsets: Int64Array, encoder: EncoderOutputs
) -> tuple[Int64Array, torch.Tensor | None]:
    """Batch rows that take an encoder embedding, and those embeddings."""
    rows: list[Int64Array] = []
    pieces: list[torch.Tensor] = []
    for (state, first, end), offset in zip(spans, offsets[:-1].tolist(), strict=True):
        for position, piece in encoder.slices(state.mm_features, first, end):
            rows.append(np.arange(len(piece)) + offset + position - first)
            pieces.append(piece)
    if not pieces:
        return np.empty(0, dtype=np.int64), None
    return np.concatenate(rows), torch.cat(pieces)


def _upstream(spans: Spans, offsets: Int64Array, device: torch.device) -> torch.Tensor | None:
    """Hidden rows of the stage before, zero behind the prompt; None if no request has any."""
    given = next((state.upstream for state, _, _ in spans if state.upstream is not None), None)
    if given is None:
        return None
    rows = given.new_zeros((int(offsets[-1]), given.shape[1]))
    for (state, first, end), offset in zip(spans, offsets[:-1].tolist(), strict=True):
        if state.upstream is not None and first < state.num_prompt_tokens:
            piece = state.upstream[first:end]
            rows[offset : offset + len(piece)] = piece
    return rows.to(device)
