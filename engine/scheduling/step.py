"""One scheduling pass: who gets how many tokens (spec kv 6)."""

from slotmirror.engine.scheduling.plan import StepPlan
from slotmirror.engine.scheduling.request_queue import SchedulingPolicy
from slotmirror.engine.scheduling.state import SchedulerState
from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.request import Request, RequestStatus


class StepScheduler:
    """Fills one step's plan: running requests in order, then admissions.

    A running request that finds no block takes those of the least important running one: the
    last admitted (FCFS) or the largest (priority, arrival time). In a step that preempted,
    nothing is admitted. A waiting request that does not fit ends the admissions.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._config = state.config
        self._manager = state.kv_cache_manager
        self._encoder = state.encoder
        self._plan = StepPlan(
            state.config.max_num_batched_tokens, state.config.encoder_budget_tokens
        )
        self._has_preempted = False
        self._index = 0

    def run(self) -> StepPlan:
        self._schedule_running()
        if not self._has_preempted:
            self._schedule_waiting()
        return self._plan

    def _schedule_running(self) -> None:
        running = self._state.running
        while self._index < len(running) and self._plan.token_budget > 0:
            request = running[self._index]
            computed = request.num_computed_tokens
            num_new = self._capped(request.num_tokens + len(request.spec_token_ids) - computed)
            num_new = min(num_new, self._config.max_model_len - computed - 1)
            num_new, inputs = self._with_encoder_inputs(request, computed, num_new)
            if num_new <= 0:
                self._index += 1
                continue
            blocks = self._allocate_or_preempt(request, num_new)
            if blocks is None:
                break
            self._schedule(request, num_new, blocks, inputs)
            self._plan.running.append(request)
            self._schedule_drafts(request, num_new)
            self._index += 1

    def _capped(self, num_new_tokens: int) -> int:
        """As many of these tokens as the step's budget and the chunk limit allow."""
        limit = self._config.long_prefill_token_threshold or num_new_tokens
        return min(num_new_tokens, limit, self._plan.token_budget)

    def _with_encoder_inputs(
        self, request: Request, num_computed: int, num_new: int
    ) -> tuple[int, list[int]]:
        """Tokens that can be scheduled, and the encoder inputs to compute for them."""
        if not request.mm_features or num_new <= 0:
            return num_new, []
        plan = self._encoder.plan(request, num_computed, num_new, self._plan.encoder_budget)
        return plan.num_new_tokens, plan.inputs

    def _schedule(
        self, request: Request, num_new: int, blocks: BlockIds, inputs: list[int]
    ) -> None:
        self._plan.add(request, num_new, blocks, inputs)
        self._encoder.commit(request, inputs)

    def _schedule_drafts(self, request: Request, num_new: int) -> None:
        if request.spec_token_ids:
            num_drafts = num_new + request.num_computed_tokens - request.num_tokens
            if num_drafts > 0:
                self._plan.spec_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def _allocate_or_preempt(self, request: Request, num_new: int) -> BlockIds | None:
        """Slots for a running request, at the cost of the least important ones; None if it had
        to give way itself."""
        while True:
            blocks = self._manager.allocate_slots(
                request, num_new, num_lookahead_tokens=self._config.num_lookahead_tokens
            )
            if blocks is not None:
                return blocks
            victim = self._take_victim()
            if victim.request_id in self._plan.num_scheduled_tokens:
                # Its blocks are registered, but this step will not write them any more.
                self._manager.drop_unwritten_hashes(victim)
                self._index -= 1
            inputs = self._plan.cancel(victim)
            self._state.preempt(victim)
            self._encoder.reassign(self._plan, victim, inputs, request)
            self._has_preempted = True
            if victim is request:
                return None

    def _take_victim(self) -> Request:
        running = self._state.running
        if self._config.policy is SchedulingPolicy.FCFS:
            return running.pop()
        victim = max(running, key=lambda r: (r.priority, r.arrival_time))
        running.remove(victim)
        return victim

    def _schedule_waiting(self) -> None:
        state = self._state
        max_running = self._config.max_num_seqs - len(state.paused)
        while state.waiting and self._plan.token_budget > 0 and len(state.running) < max_running:
            if not self._admit(state.waiting.peek()):
                break

    def _admit(self, request: Request) -> bool:
        """Schedule the waiting request at the head of the queue; False if it must wait on."""
        manager, config = self._manager, self._config
        hits, num_hits = None, 0
        if not request.num_computed_tokens:
            hits, num_hits = manager.get_computed_blocks(request)
        num_computed = request.num_computed_tokens + num_hits
        num_new = self._capped(request.num_tokens - num_computed)
        if num_new < request.num_tokens - num_computed and not config.enable_chunked_prefill:
            return False
        num_new, inputs = self._with_encoder_inputs(request, num_computed, num_new)
        if not num_new:
            return False
        allocated = manager.allocate_slots(
            request,
            num_new,
            num_hits,
            hits,
            num_lookahead_tokens=config.num_lookahead_tokens,
            full_sequence_must_fit=config.reserve_full_isl,
            has_scheduled_reqs=bool(self._state.running),
        )
        if allocated is None:
            self._encoder.cache.release_all(request)
            return False
        self._state.waiting.pop()
        self._state.running.append(request)
        is_new = request.status is RequestStatus.WAITING
        (self._plan.new if is_new else self._plan.resumed).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        self._schedule(request, num_new, manager.get_block_ids(request.request_id), inputs)
        return True
