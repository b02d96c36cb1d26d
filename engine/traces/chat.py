"""Chat JSONL: conversations of real text, one request for every reply."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slotmirror.engine.traces.chat_tokens import BEGIN_TOKEN, ROLE_TOKENS, message_tokens
from slotmirror.engine.traces.json_lines import JsonLine, json_type, read_records
from slotmirror.engine.traces.request import TraceFormat, TraceRequest


@dataclass(frozen=True, slots=True)
class Message:
    """One message: a role of `ROLE_TOKENS` and text that UTF-8 can encode."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a chat file; `line` counts from 1."""

    line: int
    messages: tuple[Message, ...]

    def requests(self, output_tokens_max: int) -> Iterator[TraceRequest]:
        """One request for every assistant message, and one more if a user message comes last.

        A prompt is everything before the reply, then the assistant marker. The reply in the
        file, not what a model answers in its place, goes on in the later prompts: so each
        prompt extends the former one. A request generates as many tokens as the reply has
        bytes, at most `output_tokens_max` and at least 1; a reply that is not in the file
        counts as long enough.
        """
        history = [BEGIN_TOKEN]
        turn = 0
        for message in self.messages:
            if message.role == "assistant":
                turn += 1
                reply_bytes = len(message.content.encode())
                yield self._request(turn, history, min(max(reply_bytes, 1), output_tokens_max))
            history.extend(message_tokens(message.role, message.content))
        if self.messages[-1].role == "user":
            yield self._request(turn + 1, history, output_tokens_max)

    def _request(self, turn: int, history: list[int], output_tokens_max: int) -> TraceRequest:
        return TraceRequest(
            request_id=self._request_id(turn),
            prompt_token_ids=(*history, ROLE_TOKENS["assistant"]),
            output_tokens_max=output_tokens_max,
            after=self._request_id(turn - 1) if turn > 1 else None,
        )

    def _request_id(self, turn: int) -> str:
        return f"line{self.line}-turn{turn}"


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a chat file.

    Raises:
        TraceError: the file or one of its lines is unusable.
    """
    for line in read_records(path, TraceFormat.CHAT):
        yield Conversation(line.number, tuple(_messages(line)))


def _messages(line: JsonLine) -> list[Message]:
    entries = line.list_field("messages")
    messages = [_message(line, f"messages[{i}]", entry) for i, entry in enumerate(entries)]
    roles = {message.role for message in messages}
    if "assistant" not in roles and (not messages or messages[-1].role != "user"):
        raise line.error(
            "messages ask for no reply: there must be an assistant message, or a user message last"
        )
    return messages


def _message(line: JsonLine, name: str, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise line.error(f"{name} must be an object, not {json_type(entry)}")
    role = _text(line, name, "role", entry)
    if role not in ROLE_TOKENS:
        raise line.error(f"{name}.role must be one of {', '.join(ROLE_TOKENS)}, not {role!r}")
    return Message(role, _text(line, name, "content", entry))


def _text(line: JsonLine, name: str, field: str, entry: Mapping[str, object]) -> str:
    if field not in entry:
        raise line.error(f"field '{name}.{field}' is missing")
    value = entry[field]
    if not isinstance(value, str):
        raise line.error(f"{name}.{field} must be text, not {json_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise line.error(
            f"{name}.{field} has half of a surrogate pair at character {error.start + 1}"
        ) from error
    return value
