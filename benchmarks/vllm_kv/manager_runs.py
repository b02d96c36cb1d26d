"""One random sequence of operations on both managers; every result and state is compared."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm_kv import ours, peer
from vllm_kv.differing import Comparison
from vllm_kv.ours import Ours
from vllm_kv.plans import RequestSource, Scope, draw_manager

_OPERATIONS = {
    "add": 6.0,
    "decode": 10.0,
    "free": 2.0,
    "preempt": 1.5,
    "resume": 4.0,
    "retry": 3.0,
    "evict": 0.6,
    "reset": 0.5,
    "common": 0.7,
}


@dataclass
class _Pair:
    """One request on both sides, and the tokens scheduled last."""

    theirs: Any
    ours: Any
    num_scheduled: int = 0

    @property
    def both(self) -> tuple[Any, Any]:
        return self.theirs, self.ours


class ManagerRun:
    """Both managers of one seed. Ends with the first difference (`DifferenceError`)."""

    def __init__(self, seed: int, side: Ours, scope: Scope) -> None:
        self._rng = rng = random.Random(seed)
        self._plan = plan = draw_manager(rng, scope)
        self._check = Comparison(f"manager seed {seed}", plan)
        self._side = side
        self._theirs, self._ours = peer.manager(plan), side.manager(plan)
        self._hashers = peer.block_hasher(plan), side.block_hasher(plan)
        self._source = RequestSource(rng, scope, plan.max_model_len, plan.max_batched_tokens)
        self._requests: dict[str, _Pair] = {}
        self._live: dict[str, None] = {}
        self._preempted: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        self.counts: Counter[str] = Counter()

    def run(self, num_operations: int) -> Counter[str]:
        names, weights = list(_OPERATIONS), list(_OPERATIONS.values())
        for _ in range(num_operations):
            name = self._rng.choices(names, weights)[0]
            self._check.begin(name)
            if getattr(self, f"_{name}")():
                self.counts[name] += 1
                self._compare_state()
        self.counts["values compared"] = self._check.num_values
        return self.counts

    def _compare_state(self) -> None:
        theirs, mine, check = self._theirs, self._ours, self._check
        check("free queue", peer.free_queue(theirs), list(mine.pool.free_queue))
        check("cached keys", peer.num_cached_keys(theirs), mine.pool.num_cached_keys)
        check("usage", theirs.usage, mine.usage)
        events = peer.event_bytes(theirs.take_events()), self._side.event_bytes(mine.take_events())
        check("event bytes", *events)
        for req_id in self._live:
            tables = peer.table(theirs, req_id), [list(ids) for ids in mine.get_block_ids(req_id)]
            check("table", *tables)

    def _add(self) -> bool:
        plan, rng = self._source.draw(), self._rng
        pair = _Pair(peer.request(plan, self._hashers[0]), ours.request(plan, self._hashers[1]))
        self._check("hashes", pair.theirs.block_hashes, pair.ours.block_hashes)
        self._requests[plan.req_id] = pair
        num_external = rng.choice([0] * 6 + [3, self._plan.hash_block_size])
        reserved = rng.choice([0] * 5 + [3])
        delay = num_external > 0 and rng.random() < 0.5
        admitted = self._admit(plan.req_id, num_external, reserved, delay)
        (self._live if admitted else self._refused)[plan.req_id] = None
        return True

    def _resume(self) -> bool:
        return self._try_again(self._preempted)

    def _retry(self) -> bool:
        return self._try_again(self._refused)

    def _try_again(self, waiting: dict[str, None]) -> bool:
        if not waiting:
            return False
        req_id = self._rng.choice(list(waiting))
        if self._admit(req_id):
            del waiting[req_id]
            self._live[req_id] = None
        return True

    def _admit(
        self, req_id: str, num_external: int = 0, reserved: int = 0, delay: bool = False
    ) -> bool:
        pair = self._requests[req_id]
        their_hits, num_hits = peer.lookup(self._theirs, pair.theirs)
        our_hits, num_our_hits = self._ours.get_computed_blocks(pair.ours)
        self._check("hit tokens", num_hits, num_our_hits)
        self._check("hit blocks", peer.tables(their_hits), [list(ids) for ids in our_hits])
        self.counts["hit tokens"] += num_hits
        unknown = pair.theirs.num_tokens - num_hits
        num_external = min(num_external, unknown - 1)
        num_new = min(unknown - num_external, self._rng.choice([1000, 5, 8]))
        options = {
            "num_lookahead_tokens": self._plan.lookahead,
            "num_external_computed_tokens": num_external,
            "delay_cache_blocks": delay and num_external > 0,
            "full_sequence_must_fit": self._plan.full_sequence_must_fit,
            "reserved_blocks": reserved,
            "has_scheduled_reqs": bool(self._live),
        }
        admitted = self._allocate(pair, num_new, (num_hits, their_hits), our_hits, options)
        if admitted:
            for request, running in zip(pair.both, (peer.RUNNING, ours.RUNNING), strict=True):
                request.num_computed_tokens = num_hits + num_external
                request.status = running
            pair.num_scheduled = num_new
            if options["delay_cache_blocks"]:
                self._compare_state()
                self._theirs.cache_blocks(pair.theirs, num_hits + num_external)
                self._ours.register_full_blocks(pair.ours, num_hits + num_external)
        return admitted

    def _allocate(
        self, pair: _Pair, num_new: int, hits: Any, our_hits: Any, options: dict[str, Any]
    ) -> bool:
        num_hits, their_hits = hits
        theirs = self._theirs.allocate_slots(pair.theirs, num_new, num_hits, their_hits, **options)
        mine = self._ours.allocate_slots(pair.ours, num_new, num_hits, our_hits, **options)
        self._check(
            "new blocks",
            peer.tables(theirs),
            None if mine is None else [list(ids) for ids in mine],
        )
        self.counts["refused"] += mine is None
        return mine is not None

    def _decode(self) -> bool:
        if not self._live:
            return False
        rng = self._rng
        pair = self._requests[rng.choice(list(self._live))]
        for request in pair.both:
            request.num_computed_tokens += pair.num_scheduled
        pair.num_scheduled = 0
        if pair.theirs.num_tokens + 4 >= self._plan.max_model_len:
            return False
        if pair.theirs.num_computed_tokens >= pair.theirs.num_tokens:
            tokens = [rng.randrange(60, 70) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
            for request in pair.both:
                request.append_output_token_ids(list(tokens))
            self._check("hashes", pair.theirs.block_hashes, pair.ours.block_hashes)
        known = pair.theirs.num_tokens - pair.theirs.num_computed_tokens
        num_new = min(known, rng.choice([100, 5]))
        num_drafts = rng.choice([1, 2]) if num_new == known and rng.random() < 0.3 else 0
        options = {"num_lookahead_tokens": self._plan.lookahead}
        if self._allocate(pair, num_new + num_drafts, (0, None), None, options):
            pair.num_scheduled = num_new
        return True

    def _free(self) -> bool:
        if not self._live:
            return False
        self._release(self._requests.pop(self._take_live()))
        return True

    def _preempt(self) -> bool:
        if not self._live:
            return False
        req_id = self._take_live()
        pair = self._requests[req_id]
        self._release(pair)
        for request, status in zip(pair.both, (peer.PREEMPTED, ours.PREEMPTED), strict=True):
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            request.status = status
        self._preempted[req_id] = None
        return True

    def _take_live(self) -> str:
        req_id = self._rng.choice(list(self._live))
        del self._live[req_id]
        return req_id

    def _release(self, pair: _Pair) -> None:
        self._theirs.free(pair.theirs)
        self._ours.free(pair.ours)

    def _evict(self) -> bool:
        # One at a time: the order within a set is nobody's decision.
        block = self._rng.randrange(1, self._plan.num_blocks)
        self._theirs.evict_blocks({block})
        self._ours.evict_blocks({block})
        return True

    def _reset(self) -> bool:
        results = self._theirs.reset_prefix_cache(), self._ours.reset_prefix_cache()
        self._check("reset", *results)
        return True

    def _common(self) -> bool:
        """0.32 always answers 0: a named difference."""
        if not self._live or not peer.IS_0_25:
            return False
        req_id = self._rng.choice(list(self._live))
        self._check(
            "common prefix",
            self._theirs.get_num_common_prefix_blocks(req_id),
            self._ours.get_num_common_prefix_blocks(req_id),
        )
        return True
