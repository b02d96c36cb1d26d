"""What an engine tells the core: one immutable record per step (C1).

An adapter fills these in; the core sees nothing else of the engine. Arrays are read-only from the
moment they are handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]


def _empty() -> Int64Array:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that starts, or starts again, in this step.

    `num_computed_tokens` tokens are served from the KV cache (a prefix hit) or, for a
    continuation, were computed by the request itself (L1). `block_ids` is its whole block table.
    """

    req_id: str
    num_computed_tokens: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class StepEvents:
    """Everything that happened between the last step and this one, and this step's layout (C1).

    ended            finished or aborted requests; their slots may already belong to others
    preempted        requests that lost their blocks and will come back
    new              requests the engine reports as new: new ones, continuations, or resumed ones
                     where the engine reports a resume so
    resumed          preempted requests that come back by their own route, tables replaced
    replaced         ids among `new` whose prompt was replaced (L5): a new generation, from 0
    drafted          scheduled requests whose tokens of this step include unverified drafts (L7)
    verified_positions
                     for every request that the step before drafted: the position up to which its
                     tokens were accepted
    req_ids          the R scheduled requests, in batch order
    first_positions  (R,) position of the first token that each computes in this step
    num_tokens       (R,) tokens that each computes in this step
    slots            (sum of num_tokens,) the slot of each computed token, batch order
    """

    ended: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    new: tuple[AdmittedRequest, ...] = ()
    resumed: tuple[AdmittedRequest, ...] = ()
    replaced: tuple[str, ...] = ()
    drafted: tuple[str, ...] = ()
    verified_positions: Mapping[str, int] = field(default_factory=dict)
    req_ids: tuple[str, ...] = ()
    first_positions: Int64Array = field(default_factory=_empty)
    num_tokens: Int64Array = field(default_factory=_empty)
    slots: Int64Array = field(default_factory=_empty)

    @property
    def ended_generations(self) -> tuple[str, ...]:
        """Ids whose present owner ends with this step: ended ones and replaced prompts."""
        return (*self.ended, *self.replaced)

    @property
    def changes_requests(self) -> bool:
        """Whether any request comes, goes or is replaced with this step."""
        return bool(self.new or self.ended or self.preempted or self.resumed or self.replaced)

    def indices_of(self, req_ids: Sequence[str]) -> Int64Array:
        """Indices of the scheduled requests among these ids."""
        if not req_ids:
            return _empty()
        wanted = set(req_ids)
        return np.array([i for i, r in enumerate(self.req_ids) if r in wanted], dtype=np.int64)

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step; 0 for a control-only step (L6)."""
        return len(self.slots)


def offsets(counts: Int64Array, order: Int64Array | None = None) -> Int64Array:
    """Where each of these runs of rows begins if they lie one after the other in this order, which
    is their own by default: counts (3, 1, 2) → 0 3 4, in the order (2, 0, 1) → 2 5 0.
    """
    if order is None:
        return counts.cumsum() - counts
    starts = np.empty_like(counts)
    starts[order] = offsets(counts[order])
    return starts


def ranges(counts: Int64Array) -> Int64Array:
    """`0 … c-1` for every count `c`, one after the other: (3, 1) → 0 1 2 0."""
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(offsets(counts), counts)
