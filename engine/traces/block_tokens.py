"""Tokens for prompts of which only the ids of their blocks are known."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotmirror.engine.traces.block_fields import HASH_ID_BYTES


def block_tokens(hash_ids: Sequence[int], tokens_per_block: int) -> npt.NDArray[np.uint8]:
    """Byte tokens of blocks: uint8, shape ``(len(hash_ids) * tokens_per_block,)``.

    A block starts with its id, lowest byte first, so that blocks of different ids differ;
    the rest is the id and the position, mixed.
    """
    ids = np.asarray(hash_ids, dtype=np.uint64)[:, None]
    positions = np.arange(tokens_per_block, dtype=np.uint64)[None, :]
    # An odd factor of 64 bits carries every input bit into the high byte that is kept.
    mixed = (ids * np.uint64(0x9E3779B97F4A7C15) + positions) * np.uint64(0xD1342543DE82EF95)
    tokens = (mixed >> np.uint64(56)).astype(np.uint8)
    spelt = positions[:, :HASH_ID_BYTES]
    tokens[:, :HASH_ID_BYTES] = (ids >> (spelt * np.uint64(8))).astype(np.uint8)
    return tokens.reshape(-1)
