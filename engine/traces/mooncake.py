"""Mooncake traces: real requests whose text is replaced by ids of 512-token blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotmirror.engine.traces.block_fields import read_block_fields
from slotmirror.engine.traces.block_tokens import block_tokens
from slotmirror.engine.traces.json_lines import JsonLine, read_records
from slotmirror.engine.traces.request import TraceFormat, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of one hash id (Mooncake FAST'25 release, trace format)."""

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


def read_mooncake_records(path: Path) -> Iterator[MooncakeRecord]:
    """The records of a Mooncake trace.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    for line in read_records(path, TraceFormat.MOONCAKE):
        yield _record(line)


def _record(line: JsonLine) -> MooncakeRecord:
    fields = read_block_fields(line, MOONCAKE_BLOCK_TOKENS, "ms")
    return MooncakeRecord(
        line=line.number,
        timestamp=fields.timestamp,
        input_length=fields.input_length,
        output_length=fields.output_length,
        hash_ids=fields.hash_ids,
    )
