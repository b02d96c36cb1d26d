"""Which model serves which stage of the pipeline."""

import torch

from slotmirror.engine.models.base import (
    CODES_KEY,
    NUM_BYTE_TOKENS,
    NUM_CODES,
    TAPPED_KEY,
    StageModel,
)
from slotmirror.engine.models.decoder import DecoderShape
from slotmirror.engine.models.fingerprint import FingerprintModel
from slotmirror.engine.models.fingerprint_formula import HIDDEN_WIDTH
from slotmirror.engine.models.transformer import TalkerTransformer, ThinkerTransformer
from slotmirror.engine.pipeline_types import THINKER, PipelineConfig

_TALKER_SEED_STEP = 1
"""The stages have different weights."""


def build_stage_model(config: PipelineConfig, stage: str, device: torch.device) -> StageModel:
    """The model of `stage`, its KV cache included, on `device`."""
    num_blocks, block_size = config.stage(stage).num_blocks, config.block_size
    deferred = frozenset({CODES_KEY}) if config.defer_codes and stage != THINKER else frozenset()
    if config.model == "fingerprint":
        is_thinker = stage == THINKER
        return FingerprintModel(
            num_blocks=num_blocks,
            block_size=block_size,
            row_widths={TAPPED_KEY: HIDDEN_WIDTH} if is_thinker else {CODES_KEY: NUM_CODES},
            num_next_tokens=NUM_BYTE_TOKENS,
            needs_full_hidden=is_thinker,
            device=device,
            deferred_keys=deferred,
        )
    shape = DecoderShape()
    if stage == THINKER:
        return ThinkerTransformer(
            shape, num_blocks=num_blocks, block_size=block_size, seed=config.seed, device=device
        )
    return TalkerTransformer(
        shape,
        upstream_width=shape.width,
        num_blocks=num_blocks,
        block_size=block_size,
        seed=config.seed + _TALKER_SEED_STEP,
        device=device,
        deferred_keys=deferred,
    )
