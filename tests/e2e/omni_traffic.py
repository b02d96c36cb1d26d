"""A seeded batch engine that speaks vLLM's scheduler output, for driving two caches alike."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

BLOCK = 4


@dataclass(eq=False)
class _Request:
    req_id: str
    tokens: list[int]
    end: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class Step:
    """What the runner has in one step: the scheduler's output and its own batch."""

    output: SchedulerOutput
    order: list[str]
    tables: dict[str, list[int]]
    first: dict[str, int]
    rows: torch.Tensor
    """(n, 3) int64, in the runner's order; what a token computes depends on its prefix alone."""


class Traffic:
    """Shared prefixes over a few blocks; finished and aborted requests; no preemption."""

    def __init__(self, seed: int, num_blocks: int = 40) -> None:
        self._rng = random.Random(seed)
        self._free = list(range(num_blocks))
        self._known: dict[tuple[int, ...], int] = {}
        self._running: list[_Request] = []
        self._finished: set[str] = set()
        self._count = 0
        self._prefixes = [[self._rng.randrange(99) for _ in range(20)] for _ in range(3)]

    def step(self) -> Step:
        """The next step; always with at least one token."""
        self._retire()
        known = dict(self._known)
        while len(self._running) < 2 or (len(self._running) < 5 and self._rng.random() < 0.5):
            self._admit(known)
        new, cached, counts = [], CachedRequestData.make_empty(), {}
        for request in self._running:
            count = min(self._rng.randint(1, 9), request.end - request.computed)
            grown = self._grow(request, request.computed + count)
            counts[request.req_id] = count
            if request in self._admitted:
                new.append(_new_request(request))
            else:
                cached.req_ids.append(request.req_id)
                cached.new_block_ids.append((grown,) if grown else None)
                cached.num_computed_tokens.append(request.computed)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs, output.scheduled_cached_reqs = new, cached
        output.num_scheduled_tokens = counts
        output.total_num_scheduled_tokens = sum(counts.values())
        output.finished_req_ids = set(self._finished)
        self._finished.clear()
        return self._computed(output, counts)

    def _computed(self, output: SchedulerOutput, counts: dict[str, int]) -> Step:
        order = list(self._running)
        self._rng.shuffle(order)
        rows = [
            _row(request.tokens[: request.computed + i + 1])
            for request in order
            for i in range(counts[request.req_id])
        ]
        first = {request.req_id: request.computed for request in order}
        for request in order:
            request.computed += counts[request.req_id]
            for end in range(BLOCK, request.computed + 1, BLOCK):
                self._known[tuple(request.tokens[:end])] = request.blocks[end // BLOCK - 1]
        self._admitted: list[_Request] = []
        tables = {request.req_id: list(request.blocks) for request in order}
        return Step(output, [r.req_id for r in order], tables, first, torch.tensor(rows))

    _admitted: list[_Request] = []

    def _admit(self, known: dict[tuple[int, ...], int]) -> None:
        tail = [self._rng.randrange(99) for _ in range(self._rng.randint(1, 9))]
        tokens = self._rng.choice(self._prefixes)[: self._rng.randint(1, 20)] + tail
        request = _Request(f"r{self._count}", tokens, len(tokens))
        self._count += 1
        for end in range(BLOCK, len(tokens), BLOCK):
            block = known.get(tuple(tokens[:end]))
            if block is None:
                break
            request.blocks.append(block)
            request.computed = end
            if block in self._free:
                self._free.remove(block)
        self._running.append(request)
        self._admitted = [*self._admitted, request]

    def _grow(self, request: _Request, end: int) -> list[int]:
        grown = []
        while len(request.blocks) * BLOCK < end:
            block = self._free.pop(0)
            for prefix in [prefix for prefix, b in self._known.items() if b == block]:
                del self._known[prefix]
            request.blocks.append(block)
            grown.append(block)
        return grown

    def _retire(self) -> None:
        for request in list(self._running):
            if request.computed >= request.end or self._rng.random() < 0.08:
                self._running.remove(request)
                self._finished.add(request.req_id)
                shared = {b for other in self._running for b in other.blocks}
                self._free += [b for b in request.blocks if b not in shared]


class BatchView:
    """The group view of a runner's batch, as both managers read it."""

    block_size = BLOCK

    def __init__(self) -> None:
        self.step: Any = SimpleNamespace(order=[], tables={}, first={})

    def batch_req_ids(self) -> list[str]:
        """Requests in row order."""
        return list(self.step.order)

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: dict[str, int]) -> torch.Tensor:
        """Slots of the scheduled tokens."""
        return torch.tensor(
            [
                self.step.tables[r][p // BLOCK] * BLOCK + p % BLOCK
                for r in req_ids
                for p in range(self.step.first[r], self.step.first[r] + num_scheduled[r])
            ]
        )


def _row(prefix: list[int]) -> list[int]:
    digest = zlib.crc32(repr(prefix).encode())
    return [digest, len(prefix), prefix[-1]]


def _new_request(request: _Request) -> NewRequestData:
    return NewRequestData(
        req_id=request.req_id,
        prompt_token_ids=list(request.tokens),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(list(request.blocks),),
        num_computed_tokens=request.computed,
        lora_request=None,
    )
