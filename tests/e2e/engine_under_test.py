"""A real engine with slotmirror's worker, its requests, and what was delivered of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_model import Reference
from vllm import LLM, SamplingParams

from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.vllm.request_ids import is_request_of

DELIVERED: dict[str, dict[str, RequestRows]] = {"on": {}, "off": {}}


def collect_on(request: RequestRows) -> None:
    """Callback of the engine with prefix caching."""
    DELIVERED["on"][request.req_id] = request


def collect_off(request: RequestRows) -> None:
    """Callback of the engine without."""
    DELIVERED["off"][request.req_id] = request


def sampling(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy, never stopped by a token."""
    return SamplingParams(
        **{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        | more
    )


def engine_arguments(slotmirror: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of a small, eager engine with slotmirror's worker."""
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "worker_cls": "slotmirror.adapters.vllm.Worker",
        "additional_config": {"slotmirror": {"debug_slots": True} | slotmirror},
    }
    return arguments | more


class EngineUnderTest:
    """One `LLM`; `caching` is "on" or "off" and also names the callback."""

    def __init__(self, folder: Path, caching: str = "on", slotmirror: Any = None, **more: Any):
        callback = {"sink": "callback", "callback": f"engine_under_test:collect_{caching}"}
        arguments = engine_arguments(
            callback | (slotmirror or {}), enable_prefix_caching=caching == "on", **more
        )
        self.caching = caching
        self.llm = LLM(str(folder), **arguments)
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[list[int]]] = {}

    def generate(self, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
        """Run prompts to their end; returns each one's first output."""
        results = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for prompt, result in zip(prompts, results, strict=True):
            self.prompts[result.request_id] = prompt
            self.outputs[result.request_id] = [list(one.token_ids) for one in result.outputs]
        return [self.outputs[result.request_id][0] for result in results]

    def finish(self, *, end_requests: bool = False) -> dict[str, Any]:
        """Flush, and return the worker's counters."""
        self.llm.collective_rpc("slotmirror_flush", kwargs={"end_requests": end_requests})
        return self.llm.collective_rpc("slotmirror_stats")[0]

    def shut_down(self) -> None:
        """End the engine as its users do not have to."""
        self.llm.llm_engine.engine_core.shutdown()

    def delivered(self) -> dict[str, list[RequestRows]]:
        """What came, by the user's request id, samples in their order."""
        got = DELIVERED[self.caching]
        return {
            request_id: [got[r] for r in sorted(got) if is_request_of(r, request_id)]
            for request_id in self.prompts
        }


def keys_of_all(engine: EngineUnderTest) -> list[str]:
    """The keys that every delivered request has; an empty list if they differ."""
    keys = {tuple(sorted(rows.rows)) for group in engine.delivered().values() for rows in group}
    return list(keys.pop()) if len(keys) == 1 else []


def max_difference(rows: RequestRows, reference: Reference, tokens: list[int]) -> float:
    """Largest difference of any key to the reference's rows of these tokens.

    Rows past the last token (asynchronous scheduling, accepted drafts) stand for no token.
    """
    expected = reference.rows(tokens)
    worst = 0.0
    for key, tensor in rows.rows.items():
        assert rows.first_positions[key] == 0
        assert len(tensor) >= len(tokens), f"{rows.req_id} {key}: {len(tensor)} rows"
        difference = (tensor[: len(tokens)].float() - expected[key].float()).abs().max()
        worst = max(worst, float(difference))
    return worst


def compare_prompts(engine: EngineUnderTest, reference: Reference) -> float:
    """Largest difference over all prompts; every one must have come, once per sample."""
    worst = 0.0
    for request_id, delivered in engine.delivered().items():
        assert len(delivered) == len(engine.outputs[request_id]), f"request {request_id}"
        for rows in delivered:
            worst = max(worst, max_difference(rows, reference, engine.prompts[request_id]))
    return worst


def compare_all(engine: EngineUnderTest, reference: Reference) -> float:
    """As `compare_prompts`, for every computed position: the last sampled token is not."""
    worst = 0.0
    for request_id, [rows] in engine.delivered().items():
        tokens = engine.prompts[request_id] + engine.outputs[request_id][0][:-1]
        worst = max(worst, max_difference(rows, reference, tokens))
    return worst


def compare_engines(one: EngineUnderTest, other: EngineUnderTest) -> float:
    """Largest difference between two engines' deliveries of the same prompts, in order."""
    worst = 0.0
    theirs = [rows for group in other.delivered().values() for rows in group]
    ours = [rows for group in one.delivered().values() for rows in group]
    for mine, yours in zip(ours, theirs, strict=True):
        for key, tensor in mine.rows.items():
            difference: torch.Tensor = (tensor.float() - yours.rows[key].float()).abs().max()
            worst = max(worst, float(difference))
    return worst
