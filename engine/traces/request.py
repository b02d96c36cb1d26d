"""What a reader hands to the engine."""

from dataclasses import dataclass
from enum import StrEnum


class TraceFormat(StrEnum):
    """The formats that `detect_format` tells apart."""

    CHAT = "chat"
    MOONCAKE = "mooncake"
    BAILIAN = "bailian"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to serve.

    Attributes:
        request_id: unique in its file; names the line, and in a chat file the turn.
        prompt_token_ids: the whole prompt, never empty.
        output_tokens_max: tokens to generate, at least 1.
        after: id of the request whose reply this one goes on from; None when nothing has to
            come first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_tokens_max: int
    after: str | None = None
