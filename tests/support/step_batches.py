"""Step batches for stage models without a scheduler: sequences over hand-made block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.engine.models.base import ForwardResult, StageModel, StepBatch


@dataclass(frozen=True)
class Part:
    """Tokens first .. end - 1 of one sequence, computed in one step over its block table."""

    token_ids: Sequence[int]
    table: Sequence[int]
    first: int
    end: int
    prefix_seed: int = 0
    upstream: torch.Tensor | None = None
    embeddings: tuple[int, torch.Tensor] | None = None
    """(offset in the sequence, rows)."""


def batch_of(parts: Sequence[Part], block_size: int) -> StepBatch:
    """The step batch that computes all `parts`, in their order."""
    counts = [part.end - part.first for part in parts]
    positions = np.concatenate([np.arange(part.first, part.end) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    tables = np.zeros((len(parts), max(len(part.table) for part in parts)), dtype=np.int64)
    for row, part in enumerate(parts):
        tables[row, : len(part.table)] = part.table
    owner = np.repeat(np.arange(len(parts)), counts)
    embedded_rows, embeddings = _embedded(parts, offsets)
    return StepBatch(
        token_ids=np.concatenate([np.asarray(p.token_ids)[p.first : p.end] for p in parts]),
        positions=positions,
        slots=tables[owner, positions // block_size] * block_size + positions % block_size,
        offsets=offsets,
        block_tables=tables,
        prefix_seeds=np.array([part.prefix_seed for part in parts], dtype=np.uint64),
        samples=np.array([part.end == len(part.token_ids) for part in parts]),
        embedded_rows=embedded_rows,
        embeddings=embeddings,
        upstream=_upstream(parts),
    )


def _embedded(parts: Sequence[Part], offsets: np.ndarray) -> tuple[np.ndarray, torch.Tensor | None]:
    rows: list[int] = []
    pieces: list[torch.Tensor] = []
    for part, start in zip(parts, offsets[:-1], strict=True):
        if part.embeddings is None:
            continue
        offset, embeddings = part.embeddings
        for index in range(len(embeddings)):
            if part.first <= offset + index < part.end:
                rows.append(int(start) + offset + index - part.first)
                pieces.append(embeddings[index : index + 1])
    return np.array(rows, dtype=np.int64), torch.cat(pieces) if pieces else None


def _upstream(parts: Sequence[Part]) -> torch.Tensor | None:
    pieces = [p.upstream[p.first : p.end] for p in parts if p.upstream is not None]
    return torch.cat(pieces) if pieces else None


def buffers_of(model: StageModel, capacity: int) -> dict[str, torch.Tensor]:
    """Output buffers of `capacity` rows, as an engine allocates them once."""
    return {
        name: torch.zeros((capacity, *spec.trailing_shape), dtype=spec.dtype)
        for name, spec in model.outputs.items()
    }


def compute(
    model: StageModel, parts: Sequence[Part], block_size: int
) -> tuple[dict[str, torch.Tensor], ForwardResult]:
    """One step; the rows of every output, in batch order, and the rest of the result."""
    batch = batch_of(parts, block_size)
    buffers = buffers_of(model, batch.num_tokens)
    result = model.forward(batch, buffers)
    return buffers, result


def compute_chunked(
    model: StageModel, part: Part, chunk: int, block_size: int
) -> dict[str, torch.Tensor]:
    """`part` in steps of at most `chunk` tokens; the concatenated rows of every output."""
    steps = []
    for first in range(part.first, part.end, chunk):
        end = min(first + chunk, part.end)
        piece = Part(
            part.token_ids,
            part.table,
            first,
            end,
            part.prefix_seed,
            part.upstream,
            part.embeddings,
        )
        steps.append(compute(model, [piece], block_size)[0])
    return {name: torch.cat([step[name] for step in steps]) for name in model.outputs}
