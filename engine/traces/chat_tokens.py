"""Byte-level tokens of a conversation: a token is a byte, or one of a few markers."""

from collections.abc import Iterable

BEGIN_TOKEN = 256
END_OF_MESSAGE_TOKEN = 257
ROLE_TOKENS = {"system": 258, "user": 259, "assistant": 260, "tool": 261}

CHAT_VOCABULARY_SIZE = 262
"""Every token id of a chat file is below this."""


def message_tokens(role: str, content: str) -> Iterable[int]:
    """One closed message: role marker, UTF-8 bytes, end marker."""
    yield ROLE_TOKENS[role]
    yield from content.encode()
    yield END_OF_MESSAGE_TOKEN
