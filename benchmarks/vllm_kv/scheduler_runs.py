"""Random steps of both schedulers; every output and state is compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm_kv import peer
from vllm_kv.differing import Comparison
from vllm_kv.ours import Ours, OurScheduler, PlannedPreemptionError
from vllm_kv.peer import PeerScheduler
from vllm_kv.plans import RequestSource, Scope, draw_scheduler

_OUTPUT_FIELDS = (
    *("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"),
    *("scheduled_encoder_inputs", "finished_req_ids", "free_encoder_mm_hashes"),
    "preempted_req_ids",
)
_CACHED_FIELDS = (
    *("req_ids", "resumed_req_ids", "num_computed_tokens", "num_output_tokens"),
    "all_token_ids",
)


class SchedulerRun:
    """Both schedulers of one seed. Ends with the first difference (`DifferenceError`), or early
    where a request is preempted in its own step: vLLM then keeps hashes of unwritten blocks."""

    def __init__(self, seed: int, side: Ours, scope: Scope) -> None:
        self._rng = rng = random.Random(seed)
        self._plan = plan = draw_scheduler(rng, scope)
        self._check = Comparison(f"scheduler seed {seed}", plan)
        self._theirs = PeerScheduler(plan, peer.block_hasher(plan.manager))
        self._ours = OurScheduler(plan, side, side.block_hasher(plan.manager))
        longest = min(plan.encoder_budget, plan.encoder_cache_size) if scope.encoder else 0
        self._source = RequestSource(rng, scope, plan.manager.max_model_len, longest)
        self.counts: Counter[str] = Counter()

    def run(self, num_steps: int) -> Counter[str]:
        for _ in range(num_steps):
            self._check.begin("step")
            self._change_requests()
            try:
                self._step()
            except PlannedPreemptionError:
                self.counts["ended by X1"] += 1
                break
            self.counts["steps"] += 1
        self.counts["values compared"] = self._check.num_values
        return self.counts

    def _change_requests(self) -> None:
        rng, theirs, mine = self._rng, self._theirs, self._ours
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            plan = self._source.draw()
            if mine.add(plan):
                theirs.add(plan)
        if rng.random() < 0.08 and theirs.scheduler.requests:
            req_id = rng.choice(list(theirs.scheduler.requests))
            theirs.abort(req_id)
            mine.scheduler.abort_request(req_id)
        if rng.random() < 0.03:
            forced = rng.random() < 0.6
            self._check(
                "reset",
                theirs.scheduler.reset_prefix_cache(forced),
                mine.scheduler.reset_prefix_cache(forced),
            )

    def _step(self) -> None:
        their_output = self._theirs.scheduler.schedule()
        our_output = self._ours.scheduler.schedule()
        self._compare_output(their_output, our_output)
        sampled = self._sample(their_output)
        outputs, stats = self._theirs.update(their_output, sampled)
        due = {req_id: tokens for req_id, tokens in sampled.items() if tokens}
        self._check("outputs", outputs, self._ours.update(our_output, due))
        self._compare_state(stats)
        self._draft(list(their_output.num_scheduled_tokens))

    def _compare_output(self, theirs: Any, mine: Any) -> None:
        check = self._check
        for name in _OUTPUT_FIELDS:
            check(name, getattr(theirs, name), getattr(mine, name))
        check("batch order", list(theirs.num_scheduled_tokens), list(mine.num_scheduled_tokens))
        check("new", *([_new(n) for n in out.scheduled_new_reqs] for out in (theirs, mine)))
        cached = theirs.scheduled_cached_reqs, mine.scheduled_cached_reqs
        for name in _CACHED_FIELDS:
            check(name, *(getattr(side, name) for side in cached))
        check("new blocks", *(_blocks(side.new_block_ids) for side in cached))
        if peer.IS_0_25:
            # 0.32 always says 0: a named difference.
            check("common prefix", theirs.num_common_prefix_blocks, mine.num_common_prefix_blocks)
        self.counts["preempted"] += len(theirs.preempted_req_ids)
        self.counts["encoder inputs"] += len(theirs.scheduled_encoder_inputs)
        self.counts["admitted with hits"] += sum(
            new.num_computed_tokens > 0 for new in theirs.scheduled_new_reqs
        )

    def _sample(self, output: Any) -> dict[str, list[int]]:
        """Tokens for every request that is past its known ones, some drafts accepted."""
        rng, sampled = self._rng, {}
        for req_id in output.num_scheduled_tokens:
            request = self._theirs.scheduler.requests[req_id]
            num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            is_due = request.num_computed_tokens >= request.num_tokens
            count = 1 + rng.randrange(num_drafts + 1) if is_due else 0
            sampled[req_id] = [rng.randrange(60, 70) for _ in range(count)]
        return sampled

    def _compare_state(self, stats: Any) -> None:
        check, theirs, mine = self._check, self._theirs.scheduler, self._ours
        check("event bytes", self._theirs.take_event_bytes(), mine.take_event_bytes())
        check("running", [r.request_id for r in theirs.running], mine.scheduler.running_req_ids)
        check("waiting", [r.request_id for r in theirs.waiting], mine.scheduler.waiting_req_ids)
        manager = mine.manager
        check("free", peer.free_queue(theirs.kv_cache_manager), list(manager.pool.free_queue))
        check("usage", theirs.kv_cache_manager.usage, manager.usage)
        our_requests = mine.scheduler._state.requests
        check("hashes", *({r: q.block_hashes for r, q in side.items()}
                          for side in (theirs.requests, our_requests)))  # fmt: skip
        admissions = vars(mine.scheduler.make_stats().prefix_cache_stats)
        lookups = manager.take_lookups()
        if stats is not None:
            # 0.25 counts every lookup; 0.32, like ours, every admission.
            counted = lookups if peer.IS_0_25 else admissions
            check("statistics", {name: getattr(stats, name) for name in counted}, counted)

    def _draft(self, req_ids: list[str]) -> None:
        rng = self._rng
        if not self._plan.num_drafts or rng.random() < 0.2:
            return
        drafts: Mapping[str, list[int]] = {
            req_id: [rng.randrange(60, 70) for _ in range(self._plan.num_drafts)]
            for req_id in req_ids
            if req_id in self._theirs.scheduler.requests
        }
        self._theirs.set_drafts(drafts)
        self._ours.scheduler.update_draft_token_ids(drafts)


def _new(new: Any) -> tuple[Any, ...]:
    return new.req_id, new.prompt_token_ids, _blocks([new.block_ids]), new.num_computed_tokens


def _blocks(per_request: Any) -> list[Any]:
    return [None if ids is None else [list(group) for group in ids] for ids in per_request]
