"""Numbered JSON objects of a file, and the checks that every field goes through."""

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slotmirror.engine.traces.errors import TraceError
from slotmirror.engine.traces.request import TraceFormat

_CHAT_MARK, _BLOCKS_MARK, _BAILIAN_MARK = "messages", "hash_ids", "chat_id"


@dataclass(frozen=True, slots=True)
class JsonLine:
    """One JSON object of a trace file, with its place for errors."""

    path: Path
    number: int
    fields: Mapping[str, object]

    def error(self, reason: str) -> TraceError:
        """The error that says `reason` of this line."""
        return TraceError(self.path, self.number, reason)

    def field(self, name: str) -> object:
        """The value of a field that must be there."""
        if name not in self.fields:
            raise self.error(f"field {name!r} is missing")
        return self.fields[name]

    def list_field(self, name: str) -> list[object]:
        """A field that must be a list."""
        value = self.field(name)
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list, not {json_type(value)}")
        return value

    def integer(self, value: object, name: str, minimum: int) -> int:
        """`value` as an int of at least `minimum`; `name` is how errors call it."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{name} must be an integer, not {json_type(value)}")
        if value < minimum:
            raise self.error(f"{name} must be at least {minimum}, not {value}")
        return value

    def format(self) -> TraceFormat:
        """The format whose marks this line bears."""
        is_chat, has_blocks = _CHAT_MARK in self.fields, _BLOCKS_MARK in self.fields
        if is_chat == has_blocks:
            raise self.error(
                f"{'both' if is_chat else 'neither'} of the fields 'messages' (a chat file) and "
                "'hash_ids' (a block trace): exactly one tells the format"
            )
        if is_chat:
            return TraceFormat.CHAT
        return TraceFormat.BAILIAN if _BAILIAN_MARK in self.fields else TraceFormat.MOONCAKE


def json_type(value: object) -> str:
    """How JSON calls the type of a decoded value."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a fraction", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def read_json_lines(path: Path) -> Generator[JsonLine]:
    """The JSON objects of a file in order; blank lines are passed over.

    Raises:
        TraceError: the file cannot be read, holds no object, or a line is not UTF-8, not JSON
            or not an object.
    """
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield _parse(path, number, line)
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror}") from error
    if empty:
        raise TraceError(path, None, "holds no records: every line is blank")


def read_records(path: Path, expected: TraceFormat) -> Iterator[JsonLine]:
    """The JSON objects of a file that must all be of one format.

    Raises:
        TraceError: as `read_json_lines`; also a line of another format.
    """
    for line in read_json_lines(path):
        found = line.format()
        if found is not expected:
            raise line.error(f"a {found} record in a {expected} file: a file has one format")
        yield line


def _parse(path: Path, number: int, line: bytes) -> JsonLine:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise TraceError(path, number, f"not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise TraceError(path, number, f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits and thousands of nested brackets: valid JSON, no record.
        raise TraceError(path, number, f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(path, number, f"a record must be an object, not {json_type(value)}")
    return JsonLine(path, number, value)
