"""The interface between the engine and a stage model.

A model owns its paged KV cache and computes one step at a time: it reads the context of every
request through that request's block table and writes the rows of this step to the step's slots.
On a prefix hit the context was written by another request, so a wrong table entry shows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

VOCAB_SIZE = 320
"""Prompt tokens: 256 bytes and 64 specials (turn marks, image placeholders)."""

NUM_BYTE_TOKENS = 256
"""Decoded text tokens are bytes: ids below this one."""

HIDDEN_KEY = "hidden"
"""Name of the hidden rows among a model's outputs; every other name is a per-token output."""

NUM_CODES = 16
"""Codes per talker frame (seed, section Implementation: `codes.audio` of width 16)."""

CODES_KEY = "codes.audio"

TAPPED_LAYER = 1
"""The layer whose output the thinker gives beside the last one's."""

TAPPED_KEY = f"hidden_states.layer_{TAPPED_LAYER}"

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Shape and type of one per-token output.

    `padded`: the engine saves it with the step's graph padding; otherwise cut to the step's tokens.
    """

    trailing_shape: tuple[int, ...]
    dtype: torch.dtype
    padded: bool


class EncoderInput(Protocol):
    """A multimodal item of a prompt: its content hash and the number of embeddings it needs."""

    @property
    def identifier(self) -> str: ...

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of n tokens of r requests, the tokens of each request next to one another.

    token_ids, positions, slots: int64 (n,), batch order.
    offsets: int64 (r + 1,); request i has the rows offsets[i] .. offsets[i + 1] - 1.
    block_tables: int64 (r, width), zero padded; covers every position up to this step's last.
    prefix_seeds: uint64 (r,); what isolates equal prompts of different salts.
    samples: bool (r,); this step computes the request's last known token: a next one is wanted.
    embedded_rows: int64 (m,), batch rows whose input is `embeddings` instead of the token.
    embeddings: (m, width) encoder outputs on the model's device; None without multimodal rows.
    upstream: (n, width) hidden rows of the stage before, zero where there are none; None without.
    """

    token_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    offsets: Int64Array
    block_tables: Int64Array
    prefix_seeds: UInt64Array
    samples: npt.NDArray[np.bool_]
    embedded_rows: Int64Array
    embeddings: torch.Tensor | None
    upstream: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def first_positions(self) -> Int64Array:
        """int64 (r,): position of each request's first row."""
        return self.positions[self.offsets[:-1]]

    @property
    def last_rows(self) -> Int64Array:
        """int64 (r,): batch row of each request's last token."""
        return self.offsets[1:] - 1


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a step returns besides the rows it wrote into the output buffers.

    next_tokens: int64 (r,), meaningful where `StepBatch.samples`.
    leftovers: outputs that are not per-token; delivered for this step only.
    """

    next_tokens: Int64Array
    leftovers: Mapping[str, object]


class StageModel(ABC):
    """One stage's model with its paged KV cache. Not thread-safe: engine thread only.

    The two class attributes are those that `ModelCachePolicy.from_model` reads.
    """

    requires_full_prefix_cached_hidden_states: bool = True
    deferred_prefix_cache_mm_keys: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, RowSpec]:
        """The per-token outputs, `HIDDEN_KEY` among them."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights, the KV cache and the output buffers live."""

    @abstractmethod
    def encode(self, item: EncoderInput) -> torch.Tensor:
        """Embeddings (item.length, width) of one multimodal item, on `device`.

        A function of the identifier and the length alone, like an encoder of the hashed content.
        """

    @abstractmethod
    def forward(self, batch: StepBatch, buffers: Mapping[str, torch.Tensor]) -> ForwardResult:
        """Compute one step; write row i of every output to `buffers[name][i]` for i < n.

        Overwrites the former step's rows: as on an engine with static graph buffers, a reader must
        have taken its copy before.
        """
