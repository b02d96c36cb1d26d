"""The engine in a process of its own: rows come back through shared memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from engine_under_test import DELIVERED, EngineUnderTest, compare_prompts, sampling
from tiny_model import Reference, Tokens

from slotmirror.adapters.delivery.shared_memory import SharedMemoryReader


def _prompts(tokens: Tokens, count: int) -> list[list[int]]:
    prefix = tokens.sequence(120)
    return [prefix + tokens.sequence(tokens.number(1, 80)) for _ in range(count)]


def shared_memory_from_another_process(folder: Path) -> dict[str, Any]:
    """Multi-process engine; this process takes the rows, and sees the producer end."""
    name = f"e2e-{os.getpid()}"
    sink = {"sink": "shared_memory", "name": name}
    engine = EngineUnderTest(folder, slotmirror=sink)
    reader = SharedMemoryReader(f"{name}-dp0")
    tokens = Tokens(12)
    for _ in range(2):
        engine.generate(_prompts(tokens, 20), sampling(3))
    alive = reader.producer_alive()
    stats = engine.finish()
    came = iter(lambda: reader.take(1.0), None)
    DELIVERED["on"].update((request.req_id, request) for request in came)
    facts = {
        "requests": len(engine.outputs),
        "worst": compare_prompts(engine, Reference(folder, torch.float32)),
        "stats": stats,
    }
    engine.shut_down()
    facts |= {"alive_before": alive, "alive_after": reader.producer_alive()}
    reader.close()
    return facts | {"left": reader.folder.exists()}
