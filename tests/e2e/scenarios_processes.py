"""The engine in a process of its own, as its users have it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from engine_under_test import DELIVERED, EngineUnderTest, compare_prompts, sampling
from tiny_model import Reference, Tokens, with_tokenizer

from slotmirror.adapters.delivery.shared_memory import SharedMemoryReader

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_hidden_states.py"


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


def example(folder: Path) -> dict[str, Any]:
    """The example as its readers start it: what it printed of each file."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), str(with_tokenizer(folder))],
            cwd=elsewhere,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return {"files": [line.split() for line in done.stdout.splitlines() if ".safetensors" in line]}
