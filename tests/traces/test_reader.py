"""Detection of the format, and files that cannot be read at all."""

import json
from pathlib import Path

import pytest

from slotmirror.core.errors import ConfigError
from slotmirror.engine.traces import (
    ReadOptions,
    TraceError,
    TraceFormat,
    detect_format,
    read_requests,
)

CHAT = {"messages": [{"role": "user", "content": "a"}]}
MOONCAKE = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [0]}


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(("record", "expected"), [(CHAT, "chat"), (MOONCAKE, "mooncake")])
def test_the_first_line_that_is_not_blank_tells_the_format(
    tmp_path: Path, record: object, expected: str
) -> None:
    """Blank lines before it and between records are passed over, and still counted."""
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n  \n{json.dumps(record)}\n\n{json.dumps(record)}")
    assert detect_format(path) is TraceFormat(expected)
    requests = list(read_requests(path, ReadOptions()))
    assert [r.request_id.split("-")[0] for r in requests] == ["line3", "line5"]


@pytest.mark.parametrize(
    ("record", "found"), [({"prompt": "x"}, "neither"), ({**CHAT, **MOONCAKE}, "both")]
)
def test_a_line_of_no_format_says_what_tells_one(
    tmp_path: Path, record: object, found: str
) -> None:
    """Neither mark, or both: the error names the two fields."""
    path = write_lines(tmp_path / "t.jsonl", record)
    with pytest.raises(TraceError) as caught:
        detect_format(path)
    assert str(caught.value) == (
        f"{path}:1: {found} of the fields 'messages' (a chat file) and 'hash_ids' "
        "(a block trace): exactly one tells the format"
    )


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (CHAT, MOONCAKE, "a mooncake record in a chat file: a file has one format"),
        (MOONCAKE, CHAT, "a chat record in a mooncake file: a file has one format"),
    ],
)
def test_formats_do_not_mix(tmp_path: Path, first: object, second: object, reason: str) -> None:
    """A record of the other format ends the reading at its line."""
    path = write_lines(tmp_path / "t.jsonl", first, second)
    with pytest.raises(TraceError) as caught:
        list(read_requests(path, ReadOptions()))
    assert str(caught.value) == f"{path}:2: {reason}"


BAD_BYTES = {
    "not json": (b"{'a': 1}\n", "not JSON: Expecting property name enclosed in double quotes"),
    "cut off": (b'{"messages": [', "not JSON: Expecting value at column 15"),
    "two values": (b"{} {}\n", "not JSON: Extra data at column 4"),
    "byte order mark": (b"\xef\xbb\xbf{}\n", "not JSON: Unexpected UTF-8 BOM"),
    "not utf-8": (b'{"a": "\xff"}\n', "not UTF-8 at byte 8"),
    "no object": (b"[1]\n", "a record must be an object, not a list"),
    "null": (b"null\n", "a record must be an object, not null"),
    "endless number": (b'{"a": ' + b"1" * 5000 + b"}\n", "not JSON that can be read: "),
    "endless nesting": (b"[" * 200_000 + b"\n", "not JSON that can be read: "),
}


@pytest.mark.parametrize(("data", "reason"), BAD_BYTES.values(), ids=BAD_BYTES.keys())
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """What is wrong with the line is said in one sentence, with the column where there is one."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + data)
    with pytest.raises(TraceError) as caught:
        detect_format(path)
    assert str(caught.value).startswith(f"{path}:2: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    """A file without records is no trace; no line is at fault."""
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        read_requests(path, ReadOptions())
    assert str(caught.value) == f"{path}: holds no records: every line is blank"
    assert caught.value.line is None


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    """The error is the readers' own, with the system's reason."""
    with pytest.raises(TraceError, match="cannot be read: No such file or directory"):
        read_requests(tmp_path / "none.jsonl", ReadOptions())
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        detect_format(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 3}, "scale=3: must be one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"scale": 0}, "scale=0: must be one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"limit": 0}, "limit=0: must be at least 1"),
        ({"output_tokens_max": 0}, "output_tokens_max=0: must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    """The error names the setting, its value and the range."""
    with pytest.raises(ConfigError) as caught:
        ReadOptions(**options)
    assert str(caught.value) == message
