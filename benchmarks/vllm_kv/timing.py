"""Times of both sides, operation by operation, in turns within one run."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vllm_kv import ours, peer
from vllm_kv.ours import Ours
from vllm_kv.plans import ManagerPlan, RequestPlan

BLOCK_SIZE = 16
_DECODE_STEPS = 20
_OTHER_ALGORITHMS = ("sha256_cbor", "xxhash", "xxhash_cbor")
_LOOKUPS = 5
_CLOCK_SAMPLES = 2000
_VOCABULARY = 150_000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Side:
    """The calls of one side."""

    manager: Callable[[ManagerPlan], Any]
    request: Callable[[RequestPlan, Any], Any]
    hashers: dict[str, Any]
    lookup: Callable[[Any, Any], tuple[Any, int]]
    running: Any


@dataclass(frozen=True)
class Time:
    """Medians in microseconds of thread CPU time."""

    operation: str
    num_tokens: int
    theirs_us: float
    ours_us: float

    @property
    def ratio(self) -> float:
        """Theirs over ours: above 1 ours is faster."""
        return self.theirs_us / self.ours_us


class Samples:
    """Microseconds of thread CPU time per operation, the clock's own taken off."""

    def __init__(self) -> None:
        self._by_operation: dict[str, list[float]] = defaultdict(list)
        for _ in range(_CLOCK_SAMPLES):
            self.time("clock", int)
        self._clock_us = statistics.median(self._by_operation.pop("clock"))

    def time(self, operation: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call it once and keep how long it took."""
        started = time.thread_time()
        result = call(*arguments)
        self._by_operation[operation].append((time.thread_time() - started) * 1e6)
        return result

    def medians(self) -> dict[str, float]:
        return {
            operation: max(statistics.median(samples) - self._clock_us, 0.01)
            for operation, samples in self._by_operation.items()
        }


def measure(side: Ours, num_tokens: int, repetitions: int) -> list[Time]:
    """Every operation on prompts of this length, with sha256 and blocks of 16."""
    plan = ManagerPlan(num_tokens // BLOCK_SIZE + 8, ((BLOCK_SIZE, None),), 1 << 20, 1 << 20)
    plans = [replace(plan, algo=algo) for algo in (plan.algo, *_OTHER_ALGORITHMS)]
    theirs = Side(
        lambda plan: peer.manager(plan, events=False),
        peer.request,
        {plan.algo: peer.block_hasher(plan) for plan in reversed(plans)},
        peer.lookup,
        peer.RUNNING,
    )
    mine = Side(
        lambda plan: side.manager(plan, events=False),
        ours.request,
        {plan.algo: side.block_hasher(plan) for plan in plans},
        lambda manager, request: manager.get_computed_blocks(request),
        ours.RUNNING,
    )
    # What vLLM's modules hold is not looked through again before every run.
    gc.freeze()
    samples = Samples(), Samples()
    for seed in range(repetitions):
        rng = random.Random(seed)
        tokens = tuple(rng.randrange(_VOCABULARY) for _ in range(num_tokens + 1))
        for one, taken in zip((theirs, mine), samples, strict=True):
            _run_once(one, plan, tokens, taken)
    theirs_us, ours_us = (taken.medians() for taken in samples)
    return [Time(name, num_tokens, theirs_us[name], ours_us[name]) for name in theirs_us]


def _run_once(side: Side, plan: ManagerPlan, tokens: tuple[int, ...], samples: Samples) -> None:
    """A request from its prompt to its end, its repeat, and another one that evicts both."""
    manager, num_tokens = side.manager(plan), len(tokens)
    first, second, third = (
        RequestPlan(name, ids)
        for name, ids in (("a", tokens), ("b", tokens), ("c", tuple(t + 1 for t in tokens)))
    )
    gc.collect()
    gc.disable()
    for algo in _OTHER_ALGORITHMS:
        samples.time(f"request and hashes, {algo}", side.request, first, side.hashers[algo])
    hasher = side.hashers[plan.algo]
    request = samples.time("request and hashes, sha256", side.request, first, hasher)
    for _ in range(_LOOKUPS):
        hits, _ = samples.time("lookup, miss", side.lookup, manager, request)
    samples.time("allocate, cold", manager.allocate_slots, request, num_tokens, 0, hits)
    request.status, request.num_computed_tokens = side.running, num_tokens
    for _ in range(_DECODE_STEPS):
        samples.time("append one token", request.append_output_token_ids, 7)
        samples.time("decode allocate", manager.allocate_slots, request, 1)
        request.num_computed_tokens += 1
    samples.time("free", manager.free, request)
    request = side.request(second, hasher)
    hits, num_hits = samples.time("lookup, full hit", side.lookup, manager, request)
    samples.time("allocate, after full hit", manager.allocate_slots, request, 1, num_hits, hits)
    request.status, request.num_computed_tokens = side.running, num_tokens
    manager.free(request)
    request = side.request(third, hasher)
    hits, _ = side.lookup(manager, request)
    samples.time("allocate, evicting", manager.allocate_slots, request, num_tokens, 0, hits)
    gc.enable()
