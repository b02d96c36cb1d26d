"""What a stage delivers for one request, collected by position over its steps.

Prefix hits, chunks, preemptions and resumes deliver the rows of a request in pieces; `spans` says
which positions each piece stands for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.engine.errors import EngineError

CountArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Leftover:
    """One request's item of a leftover list: made by the step that computed `position` last."""

    key: str
    position: int
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class StageOutput:
    """All rows of one finished request.

    rows: per key (num_rows, *trailing shape), on the host; a position nobody delivered is zero.
    deliveries: per key int32 (num_rows,), how often each position was delivered; must be 1.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    rows: Mapping[str, torch.Tensor]
    deliveries: Mapping[str, CountArray]
    leftovers: tuple[Leftover, ...]

    @property
    def num_rows(self) -> int:
        """Positions a stage computes: the last decoded token is never an input."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    def complete_rows(self, key: str, num_positions: int) -> torch.Tensor:
        """Rows 0 .. num_positions - 1 of `key`; raises unless each was delivered exactly once."""
        counts = self.deliveries.get(key)
        if counts is None:
            raise EngineError(f"request {self.req_id!r}: no row of {key!r} was delivered")
        wrong = np.flatnonzero(counts[:num_positions] != 1)
        if len(wrong):
            raise EngineError(
                f"request {self.req_id!r}: position {wrong[0]} of {key!r} was delivered "
                f"{counts[wrong[0]]} times ({len(wrong)} of {num_positions} positions are wrong)"
            )
        return self.rows[key][:num_positions]


@dataclass(slots=True)
class RowCollector:
    """Gathers one request's rows; builder thread only. `num_rows` is known at admission."""

    req_id: str
    num_rows: int
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    deliveries: dict[str, CountArray] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)

    def add(self, key: str, first: int, end: int, rows: torch.Tensor) -> None:
        """Copy `rows` (end - first, ...) to positions first .. end - 1."""
        if not (0 <= first <= end <= self.num_rows and len(rows) == end - first):
            raise EngineError(
                f"request {self.req_id!r}: {len(rows)} rows of {key!r} delivered for positions "
                f"{first} to {end} of {self.num_rows}"
            )
        if key not in self.rows:
            self.rows[key] = rows.new_zeros((self.num_rows, *rows.shape[1:]))
            self.deliveries[key] = np.zeros(self.num_rows, dtype=np.int32)
        self.rows[key][first:end].copy_(rows)
        self.deliveries[key][first:end] += 1

    def finish(
        self, prompt_token_ids: tuple[int, ...], output_token_ids: tuple[int, ...]
    ) -> StageOutput:
        """The request's output; the collector is not used afterwards."""
        return StageOutput(
            req_id=self.req_id,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            rows=self.rows,
            deliveries=self.deliveries,
            leftovers=tuple(self.leftovers),
        )
