"""Chat files: which requests a conversation becomes, and what their tokens are."""

import json
from pathlib import Path

import pytest

from slotmirror.core.errors import UsageError
from slotmirror.engine.traces import ReadOptions, TraceError, read_conversations, read_requests
from slotmirror.engine.traces.chat_tokens import (
    BEGIN_TOKEN,
    CHAT_VOCABULARY_SIZE,
    END_OF_MESSAGE_TOKEN,
    ROLE_TOKENS,
)

DIALOGUE = [
    ("system", "be brief"),
    ("user", "hi"),
    ("assistant", "hello, what is it?"),
    ("user", "¿qué? 🐓"),
    ("tool", "{}"),
    ("assistant", "ok"),
]


def write_chat(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in conversation]})
        for conversation in conversations
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_reply_gives_one_request_with_a_bounded_output(tmp_path: Path) -> None:
    """Two replies, two requests; the output is as long as the reply, up to the cap."""
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE)
    requests = list(read_requests(path, ReadOptions(output_tokens_max=16)))
    assert [r.request_id for r in requests] == ["line1-turn1", "line1-turn2"]
    assert [r.output_tokens_max for r in requests] == [16, 2]
    assert [r.after for r in requests] == [None, "line1-turn1"]


def test_prompt_is_markers_and_bytes(tmp_path: Path) -> None:
    """A message is its role marker, its UTF-8 bytes and an end marker; the reply is opened."""
    path = write_chat(tmp_path / "c.jsonl", [("user", "é"), ("assistant", "y")])
    (request,) = read_requests(path, ReadOptions())
    assert request.prompt_token_ids == (
        BEGIN_TOKEN,
        ROLE_TOKENS["user"],
        0xC3,
        0xA9,
        END_OF_MESSAGE_TOKEN,
        ROLE_TOKENS["assistant"],
    )
    assert max(*ROLE_TOKENS.values(), BEGIN_TOKEN, END_OF_MESSAGE_TOKEN) < CHAT_VOCABULARY_SIZE


def test_every_prompt_extends_the_former_one_and_its_reply(tmp_path: Path) -> None:
    """A later prompt starts with the former prompt followed by the reply of the file."""
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE)
    first, second = (r.prompt_token_ids for r in read_requests(path, ReadOptions()))
    reply = tuple(b"hello, what is it?")
    assert second[: len(first) + len(reply)] == first + reply


def test_conversations_with_one_system_prompt_share_its_tokens(tmp_path: Path) -> None:
    """Equal first messages give equal tokens, whatever conversation they are in."""
    other = [("system", "be brief"), ("user", "other"), ("assistant", "x")]
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE, other)
    first, _, third = (r.prompt_token_ids for r in read_requests(path, ReadOptions()))
    shared = len("be brief") + 4
    assert first[:shared] == third[:shared]
    assert first[shared] != third[shared]


def test_a_last_user_message_asks_for_one_more_reply(tmp_path: Path) -> None:
    """A conversation that ends with the user is a request without a known reply."""
    path = write_chat(tmp_path / "c.jsonl", [("user", "a"), ("assistant", ""), ("user", "b")])
    requests = list(read_requests(path, ReadOptions(output_tokens_max=5)))
    assert [r.output_tokens_max for r in requests] == [1, 5]
    assert requests[1].after == requests[0].request_id


def test_limit_counts_requests(tmp_path: Path) -> None:
    """The limit may fall inside a conversation."""
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE, DIALOGUE)
    requests = read_requests(path, ReadOptions(limit=3))
    assert [r.request_id for r in requests] == ["line1-turn1", "line1-turn2", "line2-turn1"]


def test_scale_is_refused_for_a_chat_file(tmp_path: Path) -> None:
    """Real text cannot be shrunk: the error names the setting."""
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE)
    with pytest.raises(TraceError, match=r"is a chat file: scale 2 is for block traces"):
        read_requests(path, ReadOptions(scale=2))


BAD_MESSAGES = {
    "not a list": ({"messages": "hi"}, "messages must be a list, not text"),
    "no messages": (
        {"messages": []},
        "messages ask for no reply: there must be an assistant message, or a user message last",
    ),
    "nothing to answer": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        "messages ask for no reply: there must be an assistant message, or a user message last",
    ),
    "message is no object": ({"messages": [7]}, "messages[0] must be an object, not an integer"),
    "role missing": ({"messages": [{"content": "a"}]}, "field 'messages[0].role' is missing"),
    "unknown role": (
        {"messages": [{"role": "bot", "content": "a"}]},
        "messages[0].role must be one of system, user, assistant, tool, not 'bot'",
    ),
    "role is no text": (
        {"messages": [{"role": [], "content": "a"}]},
        "messages[0].role must be text, not a list",
    ),
    "content missing": (
        {"messages": [{"role": "user"}]},
        "field 'messages[0].content' is missing",
    ),
    "content is null": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        "messages[1].content must be text, not null",
    ),
    "lone surrogate": (
        {"messages": [{"role": "user", "content": "ab\ud83d"}]},
        "messages[0].content has half of a surrogate pair at character 3",
    ),
}


@pytest.mark.parametrize(("record", "reason"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_bad_conversation_is_named_with_its_line(
    tmp_path: Path, record: object, reason: str
) -> None:
    """The error says the file, the line and what is wrong; the lines before it were served."""
    path = write_chat(tmp_path / "c.jsonl", DIALOGUE)
    path.write_text(path.read_text() + "\n" + json.dumps(record) + "\n")
    conversations = read_conversations(path)
    assert next(conversations).line == 1
    with pytest.raises(TraceError) as caught:
        next(conversations)
    assert str(caught.value) == f"{path}:3: {reason}"
    assert (caught.value.path, caught.value.line, caught.value.reason) == (path, 3, reason)
    assert isinstance(caught.value, UsageError)
