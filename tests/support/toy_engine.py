"""A seeded engine that does everything an engine may do, and says so as step events.

Blocks are hashed when they are scheduled, as vLLM does, so requests hit blocks of the same step and
of steps that were never saved; freed blocks keep their hash until they are handed out again;
finished requests are reported late; preempted ones come back by either route.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from slotmirror.core.block_tables import BlockTables
from slotmirror.core.events import AdmittedRequest, StepEvents


@dataclass(eq=False)
class ToyRequest:
    """A request: its tokens so far, its blocks, how much of it is computed."""

    req_id: str
    tokens: list[int]
    prompt: int
    max_tokens: int
    generation: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    was_preempted: bool = False


@dataclass(frozen=True)
class ScheduledPart:
    """What one request does in a step: positions first … first + count - 1, after `hit` tokens."""

    request: ToyRequest
    first: int
    count: int
    slots: list[int]
    hit: int
    hit_slots: list[int]
    continuation: bool


@dataclass(frozen=True)
class ToyStep:
    """One step: the events for the cache, and the parts for the model that checks it."""

    events: StepEvents
    parts: list[ScheduledPart]
    ended: list[ToyRequest]


class ToyEngine:
    """Continuous batching over a few blocks; every choice comes from one seed."""

    def __init__(self, rng: random.Random, *, num_blocks: int, block_size: int) -> None:
        self._rng = rng
        self._size = block_size
        self._free = deque(range(num_blocks))
        self._refs = [0] * num_blocks
        self._block_of: dict[tuple[int, ...], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}
        self._tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
        self._running: list[ToyRequest] = []
        self._waiting: deque[ToyRequest] = deque()
        self._to_report: list[ToyRequest] = []
        self._names = 0
        self._generations = 0
        self._prefixes = [[rng.randrange(50) for _ in range(rng.randrange(4, 20))] for _ in "abc"]
        self.preemptions = 0
        self.recycled_blocks = 0

    def step(self) -> ToyStep:
        """Schedule one step."""
        rng = self._rng
        while len(self._waiting) < 2 and rng.random() < 0.8:
            self._waiting.append(self._fresh_request())
        for request in list(self._running):
            done = len(request.tokens) >= request.prompt + request.max_tokens
            if request.computed >= len(request.tokens) - 1 and (done or rng.random() < 0.03):
                self._finish(request)
        # Engines report an end one step late; sometimes with the step that hands the blocks on.
        ended = [r for r in self._to_report if rng.random() < 0.7]
        preempted: list[ToyRequest] = []
        if self._running and rng.random() < 0.12:
            preempted.append(self._preempt(rng.choice(self._running)))
        parts, appended, new, resumed = [], {}, [], []
        for request in list(self._running):
            if request in self._running and rng.random() < 0.9:
                part = self._advance(request, preempted, parts)
                if part is not None:
                    parts.append(part)
                    self._announce(part, appended, new)
        self._admit(parts, new, resumed, preempted, ended)
        self._to_report = [r for r in self._to_report if r not in ended]
        rng.shuffle(parts)
        parts = [p for p in parts if p.request not in preempted or p.hit or p.request.blocks]
        events = self._tables.step(
            ended=[r.req_id for r in ended],
            preempted=[r.req_id for r in preempted],
            new=new,
            resumed=resumed,
            appended=appended,
            num_scheduled_tokens={p.request.req_id: p.count for p in parts},
            num_computed_tokens={p.request.req_id: p.first for p in parts},
        )
        for part in parts:
            part.request.computed = part.first + part.count
            if part.request.computed == len(part.request.tokens):
                part.request.tokens.append(rng.randrange(50))
        return ToyStep(events, parts, ended)

    def _fresh_request(self) -> ToyRequest:
        rng = self._rng
        reuse = [r.req_id for r in self._to_report]
        self._generations += 1
        self._names += 1
        live = {r.req_id for r in (*self._running, *self._waiting)}
        name = rng.choice(reuse) if reuse and rng.random() < 0.3 else f"r{self._names}"
        if name in live:
            name = f"r{self._names}"
        tokens = [
            *rng.choice(self._prefixes),
            *(rng.randrange(50) for _ in range(rng.randrange(1, 9))),
        ]
        cut = rng.randrange(1, len(tokens) + 1)
        tokens = tokens[:cut]
        return ToyRequest(name, tokens, len(tokens), rng.randrange(1, 8), self._generations)

    # -- blocks -----------------------------------------------------------------------------

    def _take_block(self) -> int | None:
        if not self._free:
            return None
        block = self._free.popleft()
        prefix = self._prefix_of.pop(block, None)
        if prefix is not None:
            del self._block_of[prefix]
            self.recycled_blocks += 1
        self._refs[block] = 1
        return block

    def _release(self, request: ToyRequest) -> None:
        for block in reversed(request.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
        request.blocks = []

    def _register(self, request: ToyRequest, end: int) -> None:
        for index in range(end // self._size):
            prefix = tuple(request.tokens[: (index + 1) * self._size])
            block = request.blocks[index]
            if prefix not in self._block_of and block not in self._prefix_of:
                self._block_of[prefix] = block
                self._prefix_of[block] = prefix

    def _finish(self, request: ToyRequest) -> None:
        self._running.remove(request)
        self._release(request)
        self._to_report.append(request)

    def _preempt(self, request: ToyRequest) -> ToyRequest:
        self._running.remove(request)
        self._release(request)
        request.computed = 0
        request.was_preempted = True
        self._waiting.appendleft(request)
        self.preemptions += 1
        return request

    # -- scheduling -------------------------------------------------------------------------

    def _advance(
        self, request: ToyRequest, preempted: list[ToyRequest], parts: list[ScheduledPart]
    ) -> ScheduledPart | None:
        count = min(len(request.tokens) - request.computed, self._rng.randrange(1, 7))
        taken = {p.request for p in parts}
        while len(request.blocks) * self._size < request.computed + count:
            block = self._take_block()
            if block is not None:
                request.blocks.append(block)
                continue
            victims = [r for r in self._running if r not in taken and r is not request]
            if not victims:
                preempted.append(self._preempt(request))
                return None
            preempted.append(self._preempt(victims[-1]))
        return self._part(request, request.computed, count, 0, continuation=False)

    def _part(
        self, request: ToyRequest, first: int, count: int, hit: int, *, continuation: bool
    ) -> ScheduledPart:
        self._register(request, first + count)
        slots = [self._slot(request, p) for p in range(first, first + count)]
        hit_slots = [self._slot(request, p) for p in range(hit)]
        return ScheduledPart(request, first, count, slots, hit, hit_slots, continuation)

    def _slot(self, request: ToyRequest, position: int) -> int:
        return request.blocks[position // self._size] * self._size + position % self._size

    def _announce(
        self,
        part: ScheduledPart,
        appended: dict[str, list[int]],
        new: list[AdmittedRequest],
    ) -> None:
        request = part.request
        if self._rng.random() < 0.1:  # a continuation: the whole table comes again (L1)
            new.append(AdmittedRequest(request.req_id, part.first, tuple(request.blocks)))
            return
        known = -(-part.first // self._size)
        appended[request.req_id] = request.blocks[known:]

    def _admit(
        self,
        parts: list[ScheduledPart],
        new: list[AdmittedRequest],
        resumed: list[AdmittedRequest],
        preempted: list[ToyRequest],
        ended: list[ToyRequest],
    ) -> None:
        for request in list(self._waiting):
            if len(self._running) >= 5 or self._rng.random() < 0.3:
                return
            unreported = [r for r in self._to_report if r.req_id == request.req_id]
            ended.extend(r for r in unreported if r not in ended)
            part = self._admit_one(request)
            if part is None:
                return
            self._waiting.remove(request)
            self._running.append(request)
            parts.append(part)
            admitted = AdmittedRequest(request.req_id, part.hit, tuple(request.blocks))
            by_own_route = request.was_preempted and self._rng.random() < 0.5
            (resumed if by_own_route else new).append(admitted)
            request.was_preempted = False

    def _admit_one(self, request: ToyRequest) -> ScheduledPart | None:
        size = self._size
        hit_blocks: list[int] = []
        while (len(hit_blocks) + 1) * size < len(request.tokens):
            prefix = tuple(request.tokens[: (len(hit_blocks) + 1) * size])
            block = self._block_of.get(prefix)
            if block is None:
                break
            hit_blocks.append(block)
        hit = len(hit_blocks) * size
        count = min(len(request.tokens) - hit, self._rng.randrange(1, 12))
        needed = -(-(hit + count) // size) - len(hit_blocks)
        if needed > len([b for b in self._free if b not in hit_blocks]):
            return None
        for block in hit_blocks:
            if not self._refs[block]:
                self._free.remove(block)
            self._refs[block] += 1
        fresh = [self._take_block() for _ in range(needed)]
        request.blocks = hit_blocks + [block for block in fresh if block is not None]
        return self._part(request, hit, count, hit, continuation=False)
