"""Mooncake traces: validation, and tokens that keep the sharing of the real prompts."""

import json
from pathlib import Path

import pytest

from slotmirror.engine.traces import (
    MooncakeRecord,
    ReadOptions,
    TraceError,
    read_mooncake_records,
    read_requests,
)
from slotmirror.engine.traces.block_tokens import block_tokens
from slotmirror.engine.traces.mooncake import SCALES

GOOD = {"timestamp": 27, "input_length": 1100, "output_length": 40, "hash_ids": [0, 46, 47]}


def write_trace(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prompt(hash_ids: tuple[int, ...], input_length: int, scale: int) -> tuple[int, ...]:
    record = MooncakeRecord(1, 0, input_length, 1, hash_ids)
    return record.request(scale, output_tokens_max=16).prompt_token_ids


def test_a_record_is_read_in_the_units_of_the_file(tmp_path: Path) -> None:
    """Fields arrive unchanged; further fields are ignored."""
    path = write_trace(tmp_path / "t.jsonl", {**GOOD, "type": "chat"})
    assert list(read_mooncake_records(path)) == [MooncakeRecord(1, 27, 1100, 40, (0, 46, 47))]


@pytest.mark.parametrize("scale", SCALES)
def test_lengths_are_divided_and_rounded_up(scale: int) -> None:
    """Prompt and output shrink by the scale; nothing shrinks to zero."""
    request = MooncakeRecord(9, 0, 1100, 40, (5, 6, 7)).request(scale, output_tokens_max=1000)
    assert request.request_id == "line9"
    assert len(request.prompt_token_ids) == -(-1100 // scale)
    assert request.output_tokens_max == -(-40 // scale)
    silent = MooncakeRecord(9, 0, 1, 0, (5,)).request(scale, output_tokens_max=3)
    assert (len(silent.prompt_token_ids), silent.output_tokens_max) == (1, 1)


@pytest.mark.parametrize("scale", SCALES)
def test_equal_ids_give_equal_tokens_and_the_first_other_id_parts_them(scale: int) -> None:
    """Two prompts share the tokens of their common ids and differ inside the next block."""
    block = 512 // scale
    left = prompt((3, 8, 9, 4), 2048, scale)
    right = prompt((3, 8, 1, 4), 2048, scale)
    assert left[: 2 * block] == right[: 2 * block]
    assert left[2 * block : 3 * block] != right[2 * block : 3 * block]
    assert left[3 * block :] == right[3 * block :]


@pytest.mark.parametrize("scale", SCALES)
def test_a_partial_last_block_is_the_start_of_the_whole_one(scale: int) -> None:
    """The id decides the tokens, the length only how many of them there are."""
    whole = prompt((3, 8), 1024, scale)
    part = prompt((3, 8), 700, scale)
    assert part == whole[: -(-700 // scale)]


@pytest.mark.parametrize("scale", SCALES)
def test_a_scaled_prompt_may_hit_as_many_blocks_as_the_real_one(scale: int) -> None:
    """The limit of a hit, all but the last token in whole blocks, is the same at every scale."""
    for length in (1, 511, 512, 513, 1023, 1024, 1025):
        num_ids = -(-length // 512)
        scaled_length = len(prompt(tuple(range(num_ids)), length, scale))
        assert (scaled_length - 1) // (512 // scale) == (length - 1) // 512


def test_ids_spell_the_start_of_their_block() -> None:
    """Ids up to the largest one give blocks that differ in their first four tokens."""
    ids = (0, 1, 255, 256, 65_536, 2**32 - 1)
    blocks = block_tokens(ids, 4).reshape(len(ids), 4).tolist()
    assert [int.from_bytes(bytes(block), "little") for block in blocks] == list(ids)


def test_output_cap_and_limit(tmp_path: Path) -> None:
    """The cap of the output and the number of requests are bounded by the options."""
    path = write_trace(tmp_path / "t.jsonl", GOOD, GOOD, GOOD)
    requests = list(read_requests(path, ReadOptions(scale=8, limit=2, output_tokens_max=3)))
    assert [r.request_id for r in requests] == ["line1", "line2"]
    assert [r.output_tokens_max for r in requests] == [3, 3]


BAD_RECORDS = {
    "timestamp missing": ({"timestamp": None}, "timestamp must be a number, not null"),
    "timestamp text": ({"timestamp": "0"}, "timestamp must be a number, not text"),
    "timestamp boolean": ({"timestamp": True}, "timestamp must be a number, not a boolean"),
    "timestamp negative": ({"timestamp": -1}, "timestamp must be a time in ms from 0 on, not -1"),
    "timestamp nan": (
        {"timestamp": float("nan")},
        "timestamp must be a time in ms from 0 on, not nan",
    ),
    "input fraction": (
        {"input_length": 1100.0},
        "input_length must be an integer, not a fraction",
    ),
    "input boolean": ({"input_length": True}, "input_length must be an integer, not a boolean"),
    "input negative": ({"input_length": -5}, "input_length must be at least 1, not -5"),
    "input zero": ({"input_length": 0}, "input_length must be at least 1, not 0"),
    "output negative": ({"output_length": -1}, "output_length must be at least 0, not -1"),
    "output object": ({"output_length": {}}, "output_length must be an integer, not an object"),
    "ids no list": ({"hash_ids": 3}, "hash_ids must be a list, not an integer"),
    "too few ids": (
        {"hash_ids": [1, 2]},
        "2 hash_ids for input_length 1100: blocks of 512 tokens make it 3",
    ),
    "too many ids": (
        {"input_length": 1024},
        "3 hash_ids for input_length 1024: blocks of 512 tokens make it 2",
    ),
    "id text": ({"hash_ids": [1, "2", 3]}, "hash_ids[1] must be an integer, not text"),
    "id negative": ({"hash_ids": [1, 2, -3]}, "hash_ids[2] must be at least 0, not -3"),
    "id too large": (
        {"hash_ids": [1, 2**32, 3]},
        "hash_ids must be at most 4294967295, not 4294967296",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_bad_record_is_named_with_its_line(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """The error says the file, the line and what is wrong."""
    path = write_trace(tmp_path / "t.jsonl", GOOD, {**GOOD, **change})
    records = read_mooncake_records(path)
    next(records)
    with pytest.raises(TraceError) as caught:
        next(records)
    assert str(caught.value) == f"{path}:2: {reason}"


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    """Every field of the format must be there."""
    record = {name: value for name, value in GOOD.items() if name != field}
    path = write_trace(tmp_path / "t.jsonl", record)
    with pytest.raises(TraceError, match=rf"t.jsonl:1: field '{field}' is missing$"):
        next(read_mooncake_records(path))
