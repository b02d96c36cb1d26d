"""Bailian traces: real requests of a chat service, their text replaced by ids of 16-token blocks.

Format of the public Qwen-Bailian usage traces. An id stands for the tokens of its block alone,
not for the prefix before it: two prompts share what their leading ids share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotmirror.engine.traces.block_fields import HASH_ID_MAX, read_block_fields
from slotmirror.engine.traces.block_tokens import block_tokens
from slotmirror.engine.traces.json_lines import JsonLine, json_type, read_records
from slotmirror.engine.traces.request import TraceFormat, TraceRequest

BAILIAN_BLOCK_TOKENS = 16
"""Tokens of one hash id."""

BAILIAN_SCALES = (1, 2, 4)
"""Divisors of 16 that leave a block the tokens in which its id is spelt."""

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class BailianRecord:
    """One request of a trace, in the file's own units: `timestamp` in s, lengths in tokens.

    `parent_chat_id` is the `chat_id` of the turn before, `NO_PARENT` for a first one. `hash_ids`
    has one id for every 16 tokens of the prompt; what remains may have one or not.
    """

    line: int
    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    type: str
    turn: int
    hash_ids: tuple[int, ...]

    @property
    def request_id(self) -> str:
        """Unique in the file."""
        return f"line{self.line}"

    def request(self, scale: int, output_tokens_max: int, after: str | None) -> TraceRequest:
        """The request with every length divided by `scale` (one of `BAILIAN_SCALES`), rounded up.

        As for a Mooncake trace, prompts share exactly the tokens of their leading common ids. A
        rest without an id is nobody else's.
        """
        num_tokens = -(-self.input_length // scale)
        ids = (*self.hash_ids, HASH_ID_MAX - self.line)
        tokens = block_tokens(ids, BAILIAN_BLOCK_TOKENS // scale)
        output_length = max(-(-self.output_length // scale), 1)
        return TraceRequest(
            request_id=self.request_id,
            prompt_token_ids=tuple(tokens[:num_tokens].tolist()),
            output_tokens_max=min(output_length, output_tokens_max),
            after=after,
        )


def read_bailian_records(path: Path) -> Iterator[BailianRecord]:
    """The records of a Bailian trace.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    for line in read_records(path, TraceFormat.BAILIAN):
        yield _record(line)


def read_bailian_requests(path: Path, scale: int, output_tokens_max: int) -> Iterator[TraceRequest]:
    """The requests in the file's order; a turn comes after the one before, if the file has it.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    request_ids: dict[int, str] = {}
    for record in read_bailian_records(path):
        after = request_ids.get(record.parent_chat_id)
        yield record.request(scale, output_tokens_max, after)
        request_ids[record.chat_id] = record.request_id


def _record(line: JsonLine) -> BailianRecord:
    fields = read_block_fields(line, BAILIAN_BLOCK_TOKENS, "s", tail_id_optional=True)
    request_type = line.field("type")
    if not isinstance(request_type, str):
        raise line.error(f"type must be text, not {json_type(request_type)}")
    parent = line.integer(line.field("parent_chat_id"), "parent_chat_id", minimum=NO_PARENT)
    return BailianRecord(
        line=line.number,
        chat_id=line.integer(line.field("chat_id"), "chat_id", minimum=0),
        parent_chat_id=parent,
        timestamp=fields.timestamp,
        input_length=fields.input_length,
        output_length=fields.output_length,
        type=request_type,
        turn=line.integer(line.field("turn"), "turn", minimum=1),
        hash_ids=fields.hash_ids,
    )
