"""The tiny transformer, a real decoder with seeded weights, as thinker and as talker.

The thinker gives its last hidden states, those of one middle layer, and decodes bytes. The talker
adds a projection of the thinker's hidden rows to its inputs and turns every position into 16
codes.
"""

from collections.abc import Mapping

import torch
from torch import nn

from slotmirror.engine.models.base import (
    CODES_KEY,
    HIDDEN_KEY,
    NUM_BYTE_TOKENS,
    NUM_CODES,
    TAPPED_KEY,
    VOCAB_SIZE,
    EncoderInput,
    ForwardResult,
    RowSpec,
    StageModel,
    StepBatch,
)
from slotmirror.engine.models.decoder import DecoderShape, DecoderStack, seed_weights
from slotmirror.engine.models.fingerprint_formula import digest64

NUM_LEVELS = 1024
"""Levels of one code. A code is the nearest level of one bounded projection (scalar quantisation,
as in FSQ audio codecs): a rounding difference moves it by one level at most, where the argmax of
a codebook would jump."""

LEFTOVER_KEY = "step.last_hidden"
"""A list with one tensor (1, width) per request of the step: its last position's hidden row."""


class ThinkerTransformer(StageModel):
    """Text decoder of the first stage: hidden rows of the last and of one middle layer."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        num_blocks: int,
        block_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._width = shape.width
        self._decoder = DecoderStack(
            shape,
            vocab_size=VOCAB_SIZE,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
        ).to(device)
        seed_weights(self._decoder, seed)

    @property
    def outputs(self) -> Mapping[str, RowSpec]:
        row = RowSpec((self._width,), torch.float32, padded=True)
        return {HIDDEN_KEY: row, TAPPED_KEY: row}

    @property
    def device(self) -> torch.device:
        return self._device

    def encode(self, item: EncoderInput) -> torch.Tensor:
        # The seed keeps 63 bits: the generator's seeds are signed.
        generator = torch.Generator().manual_seed(digest64(item.identifier) >> 1)
        return torch.randn((item.length, self._width), generator=generator).to(self._device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, buffers: Mapping[str, torch.Tensor]) -> ForwardResult:
        hidden, tapped = self._decoder(self._decoder.embed(batch), batch)
        buffers[HIDDEN_KEY][: batch.num_tokens].copy_(hidden)
        buffers[TAPPED_KEY][: batch.num_tokens].copy_(tapped)
        last = hidden[torch.from_numpy(batch.last_rows).to(self._device)]
        logits = last @ self._decoder.embedding.weight[:NUM_BYTE_TOKENS].T
        return ForwardResult(
            next_tokens=logits.argmax(dim=1).cpu().numpy(),
            leftovers={LEFTOVER_KEY: list(torch.split(last, 1))},
        )


class TalkerTransformer(StageModel):
    """Code decoder of the second stage: 16 codes per position, hidden rows opted out."""

    requires_full_prefix_cached_hidden_states = False

    def __init__(
        self,
        shape: DecoderShape,
        *,
        upstream_width: int,
        num_blocks: int,
        block_size: int,
        seed: int,
        device: torch.device,
        deferred_keys: frozenset[str] = frozenset(),
    ) -> None:
        self.deferred_prefix_cache_mm_keys = deferred_keys
        self._device = device
        self._width = shape.width
        self._decoder = DecoderStack(
            shape,
            vocab_size=VOCAB_SIZE + NUM_LEVELS,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
        )
        self._upstream = nn.Linear(upstream_width, shape.width, bias=False)
        self._codes = nn.Linear(shape.width, NUM_CODES, bias=False)
        net = nn.ModuleList((self._decoder, self._upstream, self._codes)).to(device)
        seed_weights(net, seed)

    @property
    def outputs(self) -> Mapping[str, RowSpec]:
        return {
            HIDDEN_KEY: RowSpec((self._width,), torch.float32, padded=True),
            CODES_KEY: RowSpec((NUM_CODES,), torch.int64, padded=False),
        }

    @property
    def device(self) -> torch.device:
        return self._device

    def encode(self, item: EncoderInput) -> torch.Tensor:
        raise TypeError(
            f"the talker has no encoder (item {item.identifier!r}): multimodal content reaches it "
            "through the thinker's hidden rows"
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch, buffers: Mapping[str, torch.Tensor]) -> ForwardResult:
        inputs = self._decoder.embed(batch)
        if batch.upstream is not None:
            inputs = inputs + self._upstream(batch.upstream)
        hidden, _ = self._decoder(inputs, batch)
        levels = (torch.tanh(self._codes(hidden)) + 1) / 2 * (NUM_LEVELS - 1)
        codes = levels.round().to(torch.int64)
        buffers[HIDDEN_KEY][: batch.num_tokens].copy_(hidden)
        buffers[CODES_KEY][: batch.num_tokens].copy_(codes)
        first_codes = codes[torch.from_numpy(batch.last_rows).to(self._device), 0]
        return ForwardResult(
            next_tokens=first_codes.cpu().numpy() + VOCAB_SIZE,
            leftovers={},
        )
