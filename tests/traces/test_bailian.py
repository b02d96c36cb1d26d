"""Bailian traces: validation, turns, and tokens that keep the sharing of the real prompts."""

from pathlib import Path

import pytest

from slotmirror.engine.planning import PlanOptions, plan_trace
from slotmirror.engine.traces import (
    BailianRecord,
    ReadOptions,
    TraceError,
    TraceFormat,
    detect_format,
    read_bailian_records,
    read_requests,
)
from slotmirror.engine.traces.bailian import BAILIAN_SCALES
from support.cli_runs import run_cli
from support.trace_files import write_json_lines

GOOD = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 37,
    "output_length": 9,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 6326],
}


def write_trace(path: Path, *changes: dict[str, object]) -> Path:
    return write_json_lines(path, [GOOD | change for change in changes])


def prompts(path: Path, scale: int = 1) -> list[tuple[int, ...]]:
    return [r.prompt_token_ids for r in read_requests(path, ReadOptions(scale=scale))]


def test_a_record_is_read_in_the_units_of_the_file(tmp_path: Path) -> None:
    """The format is told by its fields; they arrive unchanged."""
    path = write_trace(tmp_path / "t.jsonl", {})
    assert detect_format(path) is TraceFormat.BAILIAN
    assert list(read_bailian_records(path)) == [
        BailianRecord(1, 159, -1, 61.114, 37, 9, "text", 1, (1089, 1090, 6326))
    ]


def test_a_turn_comes_after_the_one_before(tmp_path: Path) -> None:
    """Where the file has it; a parent that was cut off is none."""
    path = write_trace(
        tmp_path / "t.jsonl",
        {"chat_id": 7},
        {"chat_id": 9, "parent_chat_id": 7, "turn": 2},
        {"chat_id": 3, "parent_chat_id": 1000, "turn": 4},
    )
    requests = list(read_requests(path, ReadOptions(output_tokens_max=5)))
    assert [(r.request_id, r.after, r.output_tokens_max) for r in requests] == [
        ("line1", None, 5),
        ("line2", "line1", 5),
        ("line3", None, 5),
    ]


@pytest.mark.parametrize("scale", BAILIAN_SCALES)
def test_prompts_share_what_their_leading_ids_share(tmp_path: Path, scale: int) -> None:
    """Equal tokens up to the first other id, other tokens in its block; lengths are scaled."""
    path = write_trace(tmp_path / "t.jsonl", {}, {"hash_ids": [1089, 4, 6326]})
    left, right = prompts(path, scale)
    block = 16 // scale
    assert len(left) == -(-37 // scale)
    assert left[:block] == right[:block]
    assert left[block : 2 * block] != right[block : 2 * block]


def test_a_rest_without_an_id_is_shared_with_nobody(tmp_path: Path) -> None:
    """A file may give ids of whole blocks only."""
    path = write_trace(tmp_path / "t.jsonl", {"hash_ids": [1, 2]}, {"hash_ids": [1, 2]})
    left, right = prompts(path)
    assert (len(left), left[:32]) == (37, right[:32])
    assert left[32:] != right[32:]


def test_planning_takes_an_id_for_its_block_alone(tmp_path: Path) -> None:
    """Equal ids behind another beginning are another prefix: only leading ids hit."""
    path = write_trace(
        tmp_path / "t.jsonl",
        {"input_length": 33, "hash_ids": [1, 2, 3]},
        {"input_length": 33, "hash_ids": [5, 6, 3]},
        {"input_length": 33, "hash_ids": [1, 6, 3]},
        {"input_length": 33, "hash_ids": [1, 2]},
    )
    plan = plan_trace(path, PlanOptions(pool_sizes=(50,)))
    assert plan.rates.block_size == 16
    assert plan.rates.engine_hit_tokens == plan.pools[0].hit_tokens == 16 + 32
    assert plan.rates.distinct_blocks == 2 + 2 + 1


def test_the_pipeline_serves_it(tmp_path: Path) -> None:
    """A short file through both stages: turns hit what they share, every row is verified."""
    turns = [
        {"chat_id": i, "parent_chat_id": i - 1, "turn": i + 1, "input_length": 16 * (i + 2) + 5,
         "hash_ids": list(range(i + 3))}
        for i in range(4)
    ]  # fmt: skip
    result = run_cli("replay", write_trace(tmp_path / "t.jsonl", *turns), "--model", "fingerprint")
    assert result.exit_code == 0, result.output
    assert "outputs verified: 4 of 4 requests" in result.stdout


BAD_RECORDS = {
    "parent below -1": ({"parent_chat_id": -2}, "parent_chat_id must be at least -1, not -2"),
    "chat id text": ({"chat_id": "a"}, "chat_id must be an integer, not text"),
    "type number": ({"type": 3}, "type must be text, not an integer"),
    "turn zero": ({"turn": 0}, "turn must be at least 1, not 0"),
    "timestamp negative": (
        {"timestamp": -0.5},
        "timestamp must be a time in s from 0 on, not -0.5",
    ),
    "too few ids": (
        {"hash_ids": [1]},
        "1 hash_ids for input_length 37: blocks of 16 tokens make it 2 or 3",
    ),
    "too many ids": (
        {"input_length": 32},
        "3 hash_ids for input_length 32: blocks of 16 tokens make it 2",
    ),
}


@pytest.mark.parametrize(("change", "reason"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_bad_record_is_named_with_its_line(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    """The error says the file, the line and what is wrong."""
    path = write_trace(tmp_path / "t.jsonl", {}, change)
    with pytest.raises(TraceError) as caught:
        list(read_bailian_records(path))
    assert str(caught.value) == f"{path}:2: {reason}"


@pytest.mark.parametrize(
    "field", ["parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    """Every field of the format must be there."""
    record = {name: value for name, value in GOOD.items() if name != field}
    path = write_json_lines(tmp_path / "t.jsonl", [record])
    with pytest.raises(TraceError, match=rf"t.jsonl:1: field '{field}' is missing$"):
        list(read_bailian_records(path))


def test_formats_do_not_mix(tmp_path: Path) -> None:
    """A Mooncake record ends the reading at its line."""
    mooncake = {name: GOOD[name] for name in ("timestamp", "output_length")}
    mooncake |= {"input_length": 512, "hash_ids": [1]}
    path = write_json_lines(tmp_path / "t.jsonl", [GOOD, mooncake])
    with pytest.raises(TraceError, match="2: a mooncake record in a bailian file"):
        list(read_bailian_records(path))


def test_a_scale_that_leaves_no_room_for_ids_is_refused(tmp_path: Path) -> None:
    """Blocks of 16 tokens can be divided by 4 at most; planning keeps the lengths."""
    path = write_trace(tmp_path / "t.jsonl", {})
    with pytest.raises(TraceError, match="scale 8 must be one of 1, 2, 4"):
        read_requests(path, ReadOptions(scale=8))
