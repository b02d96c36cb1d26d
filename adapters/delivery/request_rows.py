"""What a sink gets: the rows of one request, whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

HIDDEN_STATES = "hidden_states"
"""The name under which sinks see the rows of the core's hidden key."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestRows:
    """Per-token outputs of one request, one contiguous run of positions per key.

    req_id             the engine's own id, suffixes included
    num_prompt_tokens  positions `0 … num_prompt_tokens - 1` are the prompt's
    rows               key → tensor (positions, …) on the host
    first_positions    key → position of that tensor's first row; 0 unless the key came later
    """

    req_id: str
    num_prompt_tokens: int
    rows: Mapping[str, torch.Tensor]
    first_positions: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(tensor.nbytes for tensor in self.rows.values())
