"""Small trace files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path


def write_json_lines(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def chat(*messages: tuple[str, str]) -> dict[str, object]:
    """A conversation from (role, text)."""
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


def block_request(input_length: int, output_length: int, hash_ids: list[int]) -> dict[str, object]:
    """A Mooncake record."""
    return {
        "timestamp": 0,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def write_small_chat(path: Path) -> Path:
    """Two conversations with one system prompt of several blocks; three requests."""
    system = ("system", "You keep the log of a lighthouse. " * 3)
    return write_json_lines(
        path,
        [
            chat(
                system,
                ("user", "Fog since four, visibility two hundred metres."),
                ("assistant", "Noted."),
                ("user", "Horn on."),
                ("assistant", "Noted: horn on, every thirty seconds."),
            ),
            chat(system, ("user", "Lamp trimmed at dusk. Wind from the west, rising.")),
        ],
    )


def write_crowded_trace(path: Path, num_requests: int) -> Path:
    """Requests that share beginnings and generate much more than their prompts: a pool that
    holds a few of them while they start is full long before they end."""
    rng = random.Random(5)
    prompts: list[list[int]] = []
    records = []
    next_id = 0
    for _ in range(num_requests):
        shared = rng.choice(prompts)[: rng.randint(1, 8)] if prompts and rng.random() < 0.7 else []
        num_blocks = rng.randint(len(shared) + 1, 12)
        own = range(next_id, next_id + num_blocks - len(shared))
        next_id = own.stop
        prompts.append([*shared, *own])
        length = num_blocks * 512 - rng.randint(0, 500)
        records.append(block_request(length, rng.randint(1000, 8000), prompts[-1]))
    return write_json_lines(path, records)
