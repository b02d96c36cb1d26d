"""The shipped conversations: well formed, and as their page describes them."""

import re

from slotmirror.engine.planning import PlanOptions, plan_trace
from slotmirror.engine.traces import ReadOptions, read_conversations, read_requests
from support.source_tree import ROOT

CONVERSATIONS = ROOT / "examples" / "conversations.jsonl"
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_the_file_is_what_its_page_says() -> None:
    """Conversations, requests, tokens and the rate on the page are those of the file."""
    conversations = list(read_conversations(CONVERSATIONS))
    lengths = [
        len(request.prompt_token_ids) for request in read_requests(CONVERSATIONS, ReadOptions())
    ]
    rate = plan_trace(CONVERSATIONS, PlanOptions()).rates.engine_rate
    assert f"holds {len(conversations)} conversations" in PAGE
    assert (
        f"{len(lengths)} requests of {min(lengths):,} to {max(lengths):,} tokens, "
        f"{sum(lengths):,} prompt tokens in all, of which {rate:.1%}".replace("%", " %")
    ) in PAGE
    kinds = [int(number) for number in re.findall(r"^\| (\d+) ", PAGE, re.MULTILINE)]
    assert sum(kinds) == len(conversations) >= 40


def test_the_conversations_are_varied() -> None:
    """Several turn counts, several shared system prompts, tool results, and more than ASCII."""
    conversations = list(read_conversations(CONVERSATIONS))
    turns = {len(list(conversation.requests(1))) for conversation in conversations}
    assert turns >= {2, 3, 4, 5, 6}
    systems = [
        conversation.messages[0].content
        for conversation in conversations
        if conversation.messages[0].role == "system"
    ]
    assert len(set(systems)) >= 5
    assert all(systems.count(text) >= 3 for text in set(systems))
    messages = [message for conversation in conversations for message in conversation.messages]
    assert any(message.role == "tool" for message in messages)
    assert sum(not message.content.isascii() for message in messages) >= 10
