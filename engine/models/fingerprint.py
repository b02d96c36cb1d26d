"""The fingerprint model: exact integer rows, each a function of the whole token prefix.

The oracle of golden tests: `fingerprint_formula.expected_rows` says what every row must be. The
model itself knows no prefix: it reads the state of the position before from the paged KV cache,
which on a prefix hit another request has written.
"""

from collections.abc import Mapping

import numpy as np
import torch

from slotmirror.engine.models import fingerprint_formula as formula
from slotmirror.engine.models.base import (
    HIDDEN_KEY,
    EncoderInput,
    ForwardResult,
    RowSpec,
    StageModel,
    StepBatch,
    UInt64Array,
)
from slotmirror.engine.paged_kv import PagedKV, slots_at

LEFTOVER_KEY = "step.last_states"
"""A list with one tensor (1, HIDDEN_WIDTH) per request of the step: its last position's row."""


class FingerprintModel(StageModel):
    """Integer fingerprints for one stage.

    `row_widths`: columns of each per-token output besides hidden; `num_next_tokens`: decoded ids
    are below it. Rows are computed on the host and copied to `device`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        row_widths: Mapping[str, int],
        num_next_tokens: int,
        needs_full_hidden: bool,
        device: torch.device,
        deferred_keys: frozenset[str] = frozenset(),
    ) -> None:
        self.requires_full_prefix_cached_hidden_states = needs_full_hidden
        self.deferred_prefix_cache_mm_keys = deferred_keys
        self._device = device
        self._num_next_tokens = num_next_tokens
        self._states = PagedKV(num_blocks, block_size, (), torch.int64, torch.device("cpu"))
        hidden = RowSpec((formula.HIDDEN_WIDTH,), torch.int64, padded=True)
        self._outputs = {HIDDEN_KEY: hidden} | {
            name: RowSpec((width,), torch.int64, padded=False) for name, width in row_widths.items()
        }

    @property
    def outputs(self) -> Mapping[str, RowSpec]:
        return self._outputs

    @property
    def device(self) -> torch.device:
        return self._device

    def encode(self, item: EncoderInput) -> torch.Tensor:
        rows = formula.encoder_rows(item.identifier, item.length)
        return torch.from_numpy(rows).to(self._device)

    def forward(self, batch: StepBatch, buffers: Mapping[str, torch.Tensor]) -> ForwardResult:
        states = self._advance(batch)
        self._states.write(torch.from_numpy(batch.slots), torch.from_numpy(states.view(np.int64)))
        for name, spec in self._outputs.items():
            rows = formula.state_rows(batch.positions, states, name, spec.trailing_shape[0])
            buffers[name][: batch.num_tokens].copy_(torch.from_numpy(rows))
        last = batch.last_rows
        leftover = formula.state_rows(
            batch.positions[last], states[last], LEFTOVER_KEY, formula.HIDDEN_WIDTH
        )
        return ForwardResult(
            next_tokens=formula.next_tokens(states[last], self._num_next_tokens),
            leftovers={LEFTOVER_KEY: list(torch.split(torch.from_numpy(leftover), 1))},
        )

    def _advance(self, batch: StepBatch) -> UInt64Array:
        """uint64 (n,): the state after every token of the step."""
        own = formula.terms(batch.token_ids, batch.positions, _contents(batch))
        sums = np.cumsum(own, dtype=np.uint64)
        starts = batch.offsets[:-1]
        before = sums[starts] - own[starts]
        previous = np.maximum(batch.first_positions - 1, 0)
        slots = slots_at(batch.block_tables, previous, self._states.block_size)
        stored = self._states.read(torch.from_numpy(slots)).numpy().view(np.uint64)
        fresh = batch.first_positions == 0
        base = np.where(fresh, formula.mix64(batch.prefix_seeds), stored)
        states: UInt64Array = sums + np.repeat(base - before, np.diff(batch.offsets))
        # A hit on blocks that an earlier request of this step fills: its state is not stored yet.
        for request in np.flatnonzero(~fresh & np.isin(slots, batch.slots)):
            writer = int(np.flatnonzero(batch.slots == slots[request])[-1])
            rows = slice(batch.offsets[request], batch.offsets[request + 1])
            states[rows] += states[writer : writer + 1] - base[request : request + 1]
        return states


def _contents(batch: StepBatch) -> UInt64Array:
    """uint64 (n,): digest of the encoder embedding and of the upstream row of every token."""
    contents = np.zeros(batch.num_tokens, dtype=np.uint64)
    if batch.upstream is not None:
        contents += formula.row_digests(batch.upstream.cpu().numpy())
    if batch.embeddings is not None:
        contents[batch.embedded_rows] += formula.row_digests(batch.embeddings.cpu().numpy())
    return contents
