"""A seeded engine that does everything an engine may do, and says so as step events.

Blocks are hashed when they are scheduled, as vLLM does, so requests hit blocks of the same step and
of steps that were never saved; freed blocks keep their hash until they are handed out again;
finished requests are reported late; preempted ones come back by either route; prompts are
replaced; names are used again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.conformance.traces.toy_requests import StepPlan, ToyRequest
from slotmirror.conformance.traces.trace import Part
from slotmirror.core.events import AdmittedRequest, StepEvents

_TOKENS = 50


@dataclass(frozen=True, slots=True)
class ToySettings:
    """Sizes of the toy's world and how often things happen; probabilities are per step."""

    num_blocks: int
    block_size: int
    prefix_tokens_max: int = 20
    tail_tokens_max: int = 8
    chunk_tokens_max: int = 8
    running_max: int = 5
    abort: float = 0.03
    preempt: float = 0.12
    continuation: float = 0.1
    replace: float = 0.04
    draft: float = 0.0
    idle: float = 0.1


class ToyEngine:
    """Continuous batching over a few blocks; every choice comes from one seed.

    `counts` tells what has happened; `prefix_of_stamp` gives (position, fingerprint) of every row
    that was computed, in the order of the stamps.
    """

    def __init__(self, rng: random.Random, settings: ToySettings) -> None:
        self._rng = rng
        self._settings = settings
        self._size = settings.block_size
        self._free = deque(range(settings.num_blocks))
        self._refs = [0] * settings.num_blocks
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}
        self._tables = BlockTables(num_blocks=settings.num_blocks, block_size=self._size)
        self._running: list[ToyRequest] = []
        self._waiting: deque[ToyRequest] = deque()
        self._to_report: list[ToyRequest] = []
        self._verified: dict[str, int] = {}
        self._owners = 0
        self._names = 0
        longest = settings.prefix_tokens_max
        self._prefixes = [self._tokens(rng.randrange(2, longest + 1)) for _ in "abc"]
        self.prefix_of_stamp: list[tuple[int, int]] = [(-1, 0)]
        self.prefixes_of_owner: dict[int, list[int]] = {}
        self.counts: Counter[str] = Counter()

    # -- the step ---------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> tuple[StepEvents, tuple[Part, ...]]:
        """Schedule one step; the parts are in batch order. The last one has no drafts."""
        rng, settings = self._rng, self._settings
        while len(self._waiting) < 2 and rng.random() < 0.8:
            self._waiting.append(self._fresh_request())
        self._end_some()
        plan = StepPlan()
        # Engines report an end one step late; sometimes with the step that hands the blocks on.
        self._report_ended(plan, [r for r in self._to_report if rng.random() < 0.7])
        if self._running and rng.random() < settings.preempt:
            self._preempt(rng.choice(self._running), plan)
        if self._running and rng.random() < settings.replace:
            self._replace(rng.choice(self._running), plan)
        for request in list(self._running):
            scheduled = any(request is other for other, _ in plan.parts)
            runs = request in self._running and not scheduled
            if runs and rng.random() >= settings.idle:
                self._advance(request, plan, may_draft=not last)
        self._admit_waiting(plan)
        rng.shuffle(plan.parts)
        events = self._tables.step(
            ended=plan.ended,
            preempted=plan.preempted,
            new=plan.new,
            resumed=plan.resumed,
            replaced=plan.replaced,
            appended=plan.appended,
            drafted=tuple(plan.drafted),
            verified_positions=self._verified,
            num_scheduled_tokens={part.req_id: len(part.slots) for _, part in plan.parts},
            num_computed_tokens={part.req_id: part.first for _, part in plan.parts},
        )
        self._verified = plan.drafted
        for request, part in plan.parts:
            request.computed = part.accepted
            request.reported = len(request.blocks)
            if request.computed == request.length:
                request.extend(self._tokens(1))
        return events, tuple(part for _, part in plan.parts)

    def end(self) -> StepEvents:
        """A step without tokens that ends every request of which the cache knows."""
        preempted = [request for request in self._waiting if request.was_preempted]
        known = [*self._running, *preempted, *self._to_report]
        self._running, self._to_report = [], []
        self._waiting.clear()
        return self._tables.step(
            ended=dict.fromkeys(request.req_id for request in known),
            verified_positions=self._verified,
            num_scheduled_tokens={},
            num_computed_tokens={},
        )

    def reset(self) -> None:
        """Forget all hashes, as after a change of weights; running requests go on."""
        self._block_of.clear()
        self._prefix_of.clear()

    def _end_some(self) -> None:
        for request in list(self._running):
            done = request.length >= request.prompt + request.tokens_max
            caught_up = request.computed >= request.length - 1
            if (caught_up and done) or self._rng.random() < self._settings.abort:
                self.counts["finishes" if caught_up and done else "aborts"] += 1
                self._running.remove(request)
                self._release(request)
                self._to_report.append(request)

    def _report_ended(self, plan: StepPlan, ended: list[ToyRequest]) -> None:
        plan.ended.extend(request.req_id for request in ended)
        self._to_report = [r for r in self._to_report if r not in ended]

    # -- requests ---------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(_TOKENS) for _ in range(count)]

    def _fresh_request(self) -> ToyRequest:
        rng = self._rng
        self._names += 1
        live = {r.req_id for r in (*self._running, *self._waiting)}
        names = [r.req_id for r in self._to_report if r.req_id not in live]
        if names and rng.random() < 0.3:
            self.counts["names used again"] += 1
            return self._generation(rng.choice(names))
        return self._generation(f"r{self._names}")

    def _generation(self, req_id: str) -> ToyRequest:
        """A new owner of this name, with a prompt of a known beginning and a tail of its own."""
        rng = self._rng
        tail = self._tokens(rng.randrange(1, self._settings.tail_tokens_max + 1))
        tokens = [*rng.choice(self._prefixes), *tail]
        tokens = tokens[: rng.randrange(1, len(tokens) + 1)]
        self._owners += 1
        request = ToyRequest(req_id, self._owners, len(tokens), rng.randrange(1, 8))
        request.extend(tokens)
        self.prefixes_of_owner[request.owner] = request.prefixes
        return request

    def _preempt(self, request: ToyRequest, plan: StepPlan) -> None:
        self._running.remove(request)
        self._release(request)
        request.computed = 0
        request.was_preempted = True
        self._waiting.appendleft(request)
        plan.preempted.append(request.req_id)
        self.counts["preemptions"] += 1

    def _replace(self, request: ToyRequest, plan: StepPlan) -> None:
        """The same id goes on with another prompt (L5); admitted at once if it fits."""
        successor = self._generation(request.req_id)
        self._running.remove(request)
        self._release(request)
        if self._admit(successor, plan):
            plan.replaced.append(request.req_id)
            self.counts["replacements"] += 1
        else:
            self.counts["aborts"] += 1
            self._to_report.append(request)

    # -- blocks -----------------------------------------------------------------------------

    def _take_block(self) -> int:
        block = self._free.popleft()
        prefix = self._prefix_of.pop(block, None)
        if prefix is not None:
            del self._block_of[prefix]
            self.counts["recycled blocks"] += 1
        self._refs[block] = 1
        return block

    def _release(self, request: ToyRequest) -> None:
        for block in reversed(request.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
        request.blocks = []
        request.reported = 0

    def _register(self, request: ToyRequest, end: int) -> None:
        for index in range(end // self._size):
            prefix = request.prefixes[(index + 1) * self._size - 1]
            block = request.blocks[index]
            if prefix not in self._block_of and block not in self._prefix_of:
                self._block_of[prefix] = block
                self._prefix_of[block] = prefix

    # -- scheduling -------------------------------------------------------------------------

    def _advance(self, request: ToyRequest, plan: StepPlan, *, may_draft: bool) -> None:
        """Schedule some tokens of a running request; victims make room, itself if need be."""
        rng, first = self._rng, request.computed
        count = min(request.length - first, rng.randrange(1, self._settings.chunk_tokens_max + 1))
        decodes = first + count == request.length
        drafts = rng.randrange(1, 4) if decodes and rng.random() < self._settings.draft else 0
        drafts *= may_draft
        if not self._make_room(request, first + count + drafts, plan):
            return
        part = self._part(request, first, count, 0, drafts)
        plan.parts.append((request, part))
        if drafts:
            plan.drafted[request.req_id] = part.accepted
            self.counts["drafted rows"] += drafts
        if rng.random() < self._settings.continuation:
            # The whole table comes again (L1).
            plan.new.append(AdmittedRequest(request.req_id, first, tuple(request.blocks)))
            self.counts["continuations"] += 1
        else:
            plan.appended[request.req_id] = request.blocks[request.reported :]

    def _make_room(self, request: ToyRequest, tokens: int, plan: StepPlan) -> bool:
        """Give the request blocks for so many tokens; False if it had to be preempted itself."""
        taken = {scheduled for scheduled, _ in plan.parts}
        while len(request.blocks) * self._size < tokens:
            if self._free:
                request.blocks.append(self._take_block())
                continue
            victims = [r for r in self._running if r not in taken and r is not request]
            self._preempt(victims[-1] if victims else request, plan)
            if not victims:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan) -> None:
        for request in list(self._waiting):
            if len(self._running) >= self._settings.running_max or self._rng.random() < 0.3:
                return
            if not self._admit(request, plan):
                return
            self._waiting.remove(request)

    def _admit(self, request: ToyRequest, plan: StepPlan) -> bool:
        part = self._admitted(request)
        if part is None:
            return False
        self._report_ended(plan, [r for r in self._to_report if r.req_id == request.req_id])
        self._running.append(request)
        plan.parts.append((request, part))
        admitted = AdmittedRequest(request.req_id, part.first, tuple(request.blocks))
        by_own_route = request.was_preempted and self._rng.random() < 0.5
        (plan.resumed if by_own_route else plan.new).append(admitted)
        self.counts["resumes"] += request.was_preempted
        self.counts["hits"] += part.first > 0
        request.was_preempted = False
        return True

    def _admitted(self, request: ToyRequest) -> Part | None:
        """Its part if its blocks fit; it starts behind the longest known prefix."""
        size = self._size
        hit_blocks: list[int] = []
        while (len(hit_blocks) + 1) * size < request.length:
            block = self._block_of.get(request.prefixes[(len(hit_blocks) + 1) * size - 1])
            if block is None:
                break
            hit_blocks.append(block)
        hit = len(hit_blocks) * size
        wanted = self._rng.randrange(1, self._settings.chunk_tokens_max + 5)
        count = min(request.length - hit, wanted)
        needed = -(-(hit + count) // size) - len(hit_blocks)
        if needed > sum(block not in hit_blocks for block in self._free):
            return None
        for block in hit_blocks:
            if not self._refs[block]:
                self._free.remove(block)
            self._refs[block] += 1
        request.blocks = hit_blocks + [self._take_block() for _ in range(needed)]
        return self._part(request, hit, count, hit)

    def _part(self, request: ToyRequest, first: int, count: int, hit: int, drafts: int = 0) -> Part:
        """The part of `count` known tokens and some drafts, of which a few turn out right."""
        self._register(request, first + count)
        end = first + count + drafts
        accepted = end
        request.extend(self._tokens(drafts))
        stamps = len(self.prefix_of_stamp)
        self.prefix_of_stamp.extend((p, request.prefixes[p]) for p in range(first, end))
        if drafts:
            accepted = self._rng.randrange(first + count, end + 1)
            del request.prefixes[accepted:]
        return Part(
            owner=request.owner,
            req_id=request.req_id,
            first=first,
            slots=tuple(self._slot(request, p) for p in range(first, end)),
            hit_slots=tuple(self._slot(request, p) for p in range(hit)),
            stamps=stamps,
            accepted=accepted,
            drafted=drafts > 0,
        )

    def _slot(self, request: ToyRequest, position: int) -> int:
        return request.blocks[position // self._size] * self._size + position % self._size
