"""Two data-parallel replicas behind one front end, as `vllm serve` runs them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import torch
from engine_under_test import engine_arguments, max_difference, sampling
from tiny_model import Reference, Tokens
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.shared_memory import SharedMemoryReader
from slotmirror.adapters.vllm.request_ids import is_request_of

REPLICAS = 2
REQUESTS = 24


def data_parallel(folder: Path) -> dict[str, Any]:
    """One configured name of shared memory, a reader per replica; every request comes once."""
    name = f"e2e-replicas-{os.getpid()}"
    tokens = Tokens(31)
    prefix = tokens.sequence(96)
    prompts = {f"user-{number}": prefix + tokens.sequence(30) for number in range(REQUESTS)}
    readers = [SharedMemoryReader(f"{name}-dp{replica}") for replica in range(REPLICAS)]
    delivered, alive = asyncio.run(_serve(folder, name, prompts, readers))
    for reader in readers:
        reader.close()
    reference = Reference(folder, torch.float32)
    came = [request for of_replica in delivered for request in of_replica]
    mine = {user: [r for r in came if is_request_of(r.req_id, user)] for user in prompts}
    return {
        "requests": len(prompts),
        "by_replica": [len(of_replica) for of_replica in delivered],
        "not_once": [user for user, requests in mine.items() if len(requests) != 1],
        "worst": max(
            max_difference(r, reference, prompts[u]) for u, rs in mine.items() for r in rs
        ),
        "alive": alive,
        "left": any(reader.folder.exists() for reader in readers),
    }


async def _serve(
    folder: Path, name: str, prompts: dict[str, list[int]], readers: list[SharedMemoryReader]
) -> tuple[list[list[RequestRows]], list[bool]]:
    arguments = engine_arguments({"sink": "shared_memory", "name": name})
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(folder), data_parallel_size=REPLICAS, **arguments)
    )
    try:
        users = list(prompts)
        # In two waves, so that the second finds the first one's blocks on both replicas.
        for wave in (users[: REQUESTS // 2], users[REQUESTS // 2 :]):
            await asyncio.gather(*(_generate(engine, user, prompts[user]) for user in wave))
        await engine.collective_rpc("slotmirror_flush")
        alive = [reader.producer_alive() for reader in readers]
        return [_take_all(reader) for reader in readers], alive
    finally:
        engine.shutdown()


async def _generate(engine: AsyncLLM, user: str, prompt: list[int]) -> None:
    async for _ in engine.generate({"prompt_token_ids": prompt}, sampling(3), request_id=user):
        pass


def _take_all(reader: SharedMemoryReader) -> list[RequestRows]:
    return list(iter(lambda: reader.take(0.0), None))
