"""vLLM's objects as far as the adapter reads them, and a worker without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

WIDTH = 4


@dataclass
class NewRequest:
    req_id: str
    prompt_token_ids: list[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    prompt_embeds: torch.Tensor | None = None


@dataclass
class CachedRequests:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None
    kv_cache_block_copies: list[Any] | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def new(req_id: str, blocks: list[int], prompt: int, computed: int = 0) -> NewRequest:
    return NewRequest(req_id, [0] * prompt, (blocks,), computed)


def cached(**requests: tuple[int, list[int] | None]) -> CachedRequests:
    """`req_id=(num_computed_tokens, new block ids or None)`."""
    return CachedRequests(
        list(requests),
        set(),
        [None if blocks is None else (blocks,) for _, blocks in requests.values()],
        [computed for computed, _ in requests.values()],
    )


def row(req_id: str, position: int) -> torch.Tensor:
    """What the fake model computes: it depends on the request's content and the position alone."""
    content = sum(map(ord, req_id.split("@")[0]))
    return torch.tensor([content, position, content * position, 1.0])


class FakeRunner:
    """V1 keeps the order of rows in its batch, V2 in its state; both share the rest."""

    def __init__(self, *, v2: bool = False, padding: int = 0) -> None:
        self.device = torch.device("cpu")
        self.execute_model_state: Any = None
        self.v2, self.padding = v2, padding
        self.reverse = True
        self.slots: torch.Tensor | None = None

    def get_model(self) -> nn.Module:
        return nn.Module()

    def run(self, output: SchedulerOutput, first: dict[str, int]) -> None:
        """A step's forward; rows come in the reverse of the scheduler's order."""
        ids = list(output.num_scheduled_tokens)
        order = ids[::-1] if self.reverse else ids
        rows = [
            row(req_id, first[req_id] + i)
            for req_id in order
            for i in range(output.num_scheduled_tokens[req_id])
        ]
        hidden = torch.stack(rows + [torch.full((WIDTH,), -1.0)] * self.padding)
        batch = SimpleNamespace(req_ids=order)
        state = SimpleNamespace(hidden_states=hidden)
        if self.v2:
            state.input_batch, state.slot_mappings_by_layer = batch, {"layer": self.slots}
        else:
            self.input_batch, state.slot_mappings = batch, {"layer": self.slots}
        self.execute_model_state = state


class PlainWorker:
    """The methods of a platform's worker that the mixin goes over, recording their calls."""

    def __init__(self, vllm_config: Any, runner: FakeRunner) -> None:
        self.vllm_config = vllm_config
        self.model_runner = runner
        self.calls: list[str] = []
        self.first: dict[str, int] = {}
        self.sampled: dict[str, list[int]] = {}

    def init_device(self) -> None:
        self.calls.append("init_device")

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.calls.append("initialize_from_config")

    def compile_or_warm_up_model(self) -> str:
        self.execute_model(SchedulerOutput({"warm": 2}, [new("warm", [1], 2)]))
        return "warm"

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.calls.append("execute_model")
        for request in scheduler_output.scheduled_new_reqs:
            self.first[request.req_id] = request.num_computed_tokens
        running = scheduler_output.scheduled_cached_reqs
        self.first.update(zip(running.req_ids, running.num_computed_tokens, strict=True))
        if scheduler_output.num_scheduled_tokens:
            self.model_runner.run(scheduler_output, self.first)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.calls.append("sample_tokens")
        self.model_runner.execute_model_state = None
        return SimpleNamespace(
            req_ids=list(self.sampled), sampled_token_ids=list(self.sampled.values())
        )

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FullAttentionSpec:
    """Named as vLLM's, whose class the gate reads by name."""

    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size


def kv_cache_config(num_blocks: int = 16, *specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups)


def vllm_config(settings: Any, *, caching: bool = True, **changes: Any) -> Any:
    """A `VllmConfig`; `changes` are dotted names with `__` for the dot."""
    config = SimpleNamespace(
        additional_config={"slotmirror": settings},
        model_config=SimpleNamespace(runner_type="generate", max_model_len=64, enforce_eager=True),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, block_size=4),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=32, policy="fcfs", async_scheduling=False
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_rank=0
        ),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for name, value in changes.items():
        section, _, attribute = name.partition("__")
        if attribute:
            setattr(getattr(config, section), attribute, value)
        else:
            setattr(config, section, value)
    return config
