"""Fields that all block traces have: arrival, lengths, ids of the prompt's blocks."""

from dataclasses import dataclass

from slotmirror.engine.traces.json_lines import JsonLine, json_type

HASH_ID_BYTES = 4
HASH_ID_MAX = 256**HASH_ID_BYTES - 1


@dataclass(frozen=True, slots=True)
class BlockFields:
    """`timestamp` in the unit of the format, lengths in tokens, one id per block of the prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_block_fields(
    line: JsonLine, block_tokens: int, time_unit: str, *, tail_id_optional: bool = False
) -> BlockFields:
    """The checked fields of a line.

    With `tail_id_optional` the partial last block may go without an id. Raises TraceError naming
    the field, the value and the rule.
    """
    timestamp = line.field("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise line.error(f"timestamp must be a number, not {json_type(timestamp)}")
    if not 0 <= timestamp < float("inf"):
        raise line.error(f"timestamp must be a time in {time_unit} from 0 on, not {timestamp}")
    input_length = line.integer(line.field("input_length"), "input_length", minimum=1)
    output_length = line.integer(line.field("output_length"), "output_length", minimum=0)
    ids = _hash_ids(line)
    _check_count(line, len(ids), input_length, block_tokens, tail_id_optional)
    return BlockFields(timestamp, input_length, output_length, ids)


def _hash_ids(line: JsonLine) -> tuple[int, ...]:
    values = line.list_field("hash_ids")
    ids = tuple(line.integer(v, f"hash_ids[{i}]", minimum=0) for i, v in enumerate(values))
    if max(ids, default=0) > HASH_ID_MAX:
        raise line.error(f"hash_ids must be at most {HASH_ID_MAX}, not {max(ids)}")
    return ids


def _check_count(
    line: JsonLine, count: int, input_length: int, block_tokens: int, tail_id_optional: bool
) -> None:
    num_whole = input_length // block_tokens
    with_tail = -(-input_length // block_tokens)
    allowed = {num_whole, with_tail} if tail_id_optional else {with_tail}
    if count not in allowed:
        raise line.error(
            f"{count} hash_ids for input_length {input_length}: blocks of {block_tokens} tokens "
            f"make it {' or '.join(map(str, sorted(allowed)))}"
        )
