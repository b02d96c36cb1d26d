"""One door for all formats: detect, then stream requests."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slotmirror.core.errors import ConfigError
from slotmirror.engine.traces.bailian import BAILIAN_SCALES, read_bailian_requests
from slotmirror.engine.traces.chat import read_conversations
from slotmirror.engine.traces.errors import TraceError
from slotmirror.engine.traces.json_lines import read_json_lines
from slotmirror.engine.traces.mooncake import SCALES, read_mooncake_records
from slotmirror.engine.traces.request import TraceFormat, TraceRequest


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How requests are made from a file.

    Attributes:
        scale: divides the lengths of a block trace; one of `SCALES`, for a Bailian trace of
            `BAILIAN_SCALES`.
        limit: requests to read at most; None reads them all.
        output_tokens_max: tokens that a request generates at most.
    """

    scale: int = 1
    limit: int | None = None
    output_tokens_max: int = 16

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            known = ", ".join(str(scale) for scale in SCALES)
            raise ConfigError("scale", self.scale, f"must be one of {known}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError("limit", self.limit, "must be at least 1")
        if self.output_tokens_max < 1:
            raise ConfigError("output_tokens_max", self.output_tokens_max, "must be at least 1")


def detect_format(path: Path) -> TraceFormat:
    """The format of a file, from its first line that is not blank.

    Raises:
        TraceError: the file cannot be read, is empty, or the line is of no known format.
    """
    with closing(read_json_lines(path)) as lines:
        return next(lines).format()


def read_requests(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    """The requests of a file of any format, in the file's order.

    The format and the options are checked at once, each line when its turn comes.

    Raises:
        TraceError: the file or one of its lines is unusable, or `scale` does not suit its format.
    """
    found = detect_format(path)
    _check_scale(path, found, options.scale)
    return islice(_READERS[found](path, options), options.limit)


def _check_scale(path: Path, found: TraceFormat, scale: int) -> None:
    if found is TraceFormat.CHAT and scale != 1:
        raise TraceError(
            path, None, f"is a chat file: scale {scale} is for block traces, leave it 1"
        )
    if found is TraceFormat.BAILIAN and scale not in BAILIAN_SCALES:
        known = ", ".join(map(str, BAILIAN_SCALES))
        raise TraceError(path, None, f"is a Bailian trace: scale {scale} must be one of {known}")


def _chat_requests(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    for conversation in read_conversations(path):
        yield from conversation.requests(options.output_tokens_max)


def _mooncake_requests(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    for record in read_mooncake_records(path):
        yield record.request(options.scale, options.output_tokens_max)


def _bailian_requests(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    return read_bailian_requests(path, options.scale, options.output_tokens_max)


_READERS = {
    TraceFormat.CHAT: _chat_requests,
    TraceFormat.MOONCAKE: _mooncake_requests,
    TraceFormat.BAILIAN: _bailian_requests,
}
