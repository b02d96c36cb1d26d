"""Mooncake traces: real requests whose text is replaced by ids of 512-token blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slotmirror.engine.traces.json_lines import JsonLine, json_type, read_records
from slotmirror.engine.traces.request import TraceFormat, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one hash id (Mooncake FAST'25 release, trace format)."""

HASH_ID_BYTES = 4
HASH_ID_MAX = 256**HASH_ID_BYTES - 1
SCALES = tuple(2**n for n in range(8))
"""Divisors of 512 that leave a block at least `HASH_ID_BYTES` tokens, in which its id is spelt."""


@dataclass(frozen=True, slots=True)
class MooncakeRecord:
    """One request of a trace, in the file's own units: `timestamp` in ms, lengths in tokens.

    `hash_ids` has one id for every 512 tokens of the prompt, the last for what remains.
    """

    line: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def request(self, scale: int, output_tokens_max: int) -> TraceRequest:
        """The request with every length divided by `scale` (one of `SCALES`), rounded up.

        A whole block becomes 512 / `scale` tokens that its id alone decides; a partial last
        block becomes the first of them. So prompts that share ids share exactly these tokens,
        prompts part with the first id that differs, and an engine whose block size is
        512 / `scale` hits as many blocks as one of 512 would on the real text: rounding up
        keeps ``(length - 1) // block size``, the blocks that a prompt may hit.
        """
        num_tokens = -(-self.input_length // scale)
        tokens = block_tokens(self.hash_ids, MOONCAKE_BLOCK_TOKENS // scale)
        output_length = max(-(-self.output_length // scale), 1)
        return TraceRequest(
            request_id=f"line{self.line}",
            prompt_token_ids=tuple(tokens[:num_tokens].tolist()),
            output_tokens_max=min(output_length, output_tokens_max),
        )


def block_tokens(hash_ids: tuple[int, ...], tokens_per_block: int) -> npt.NDArray[np.uint8]:
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


def read_mooncake_records(path: Path) -> Iterator[MooncakeRecord]:
    """The records of a Mooncake trace.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    for line in read_records(path, TraceFormat.MOONCAKE):
        yield _record(line)


def _record(line: JsonLine) -> MooncakeRecord:
    timestamp = line.field("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise line.error(f"timestamp must be a number, not {json_type(timestamp)}")
    if not 0 <= timestamp < float("inf"):
        raise line.error(f"timestamp must be a time in ms from 0 on, not {timestamp}")
    input_length = line.integer(line.field("input_length"), "input_length", minimum=1)
    output_length = line.integer(line.field("output_length"), "output_length", minimum=0)
    return MooncakeRecord(
        line=line.number,
        timestamp=timestamp,
        input_length=input_length,
        output_length=output_length,
        hash_ids=_hash_ids(line, input_length),
    )


def _hash_ids(line: JsonLine, input_length: int) -> tuple[int, ...]:
    values = line.list_field("hash_ids")
    num_blocks = -(-input_length // MOONCAKE_BLOCK_TOKENS)
    if len(values) != num_blocks:
        raise line.error(
            f"{len(values)} hash_ids for input_length {input_length}: "
            f"blocks of {MOONCAKE_BLOCK_TOKENS} tokens make it {num_blocks}"
        )
    ids = tuple(line.integer(v, f"hash_ids[{i}]", minimum=0) for i, v in enumerate(values))
    if max(ids) > HASH_ID_MAX:
        raise line.error(f"hash_ids must be at most {HASH_ID_MAX}, not {max(ids)}")
    return ids
