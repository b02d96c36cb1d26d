"""Continuous batching over the KV cache (spec kv 6).

There is no prefill or decode phase: every step gives each request tokens until its computed
tokens catch up with its known ones, within the step's budget. Owned by one thread; no locks.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from slotmirror.engine.scheduling.admission import check_length
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.encoder import EncoderScheduler
from slotmirror.engine.scheduling.fence import StepFence
from slotmirror.engine.scheduling.output import (
    RequestOutput,
    SchedulerOutput,
    SchedulerStats,
    StepResult,
)
from slotmirror.engine.scheduling.output_builder import build_output
from slotmirror.engine.scheduling.request_queue import create_request_queue
from slotmirror.engine.scheduling.state import SchedulerState
from slotmirror.engine.scheduling.step import StepScheduler
from slotmirror.kvcache.block_hashing import make_block_hasher
from slotmirror.kvcache.events import KVCacheEvent, KVEventLog
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import BlockHasher, Request
from slotmirror.kvcache.request_params import (
    FINISH_REASONS,
    MultimodalFeature,
    RequestStatus,
    SamplingParams,
)
from slotmirror.kvcache.residency import ResidencyMetrics
from slotmirror.kvcache.specs import KVCacheGroupSpec


class Scheduler:
    """Admits, runs, preempts and ends requests.

    Per step: `schedule`, the forward pass, `update_from_output`. Several steps may be in flight;
    blocks of a request that ends meanwhile are handed out only after its last step came back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_groups: Sequence[KVCacheGroupSpec] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        manager_type: type[KVCacheManager] = KVCacheManager,
        publish_kv_events: Callable[[Sequence[KVCacheEvent]], None] | None = None,
    ) -> None:
        """`kv_groups` defaults to one full-attention group; `clock` stamps arrivals, in seconds;
        `manager_type` may add observation, never other decisions; `publish_kv_events` gets the
        events of every step that has some, such as `KVEventPublisher.publish`."""
        kv_cache = config.kv_cache_config(kv_groups)
        self.config = config = config.restricted_to(kv_cache)
        rate = config.kv_metrics_sample_rate
        self._residency = ResidencyMetrics(rate) if rate else None
        self.kv_cache_manager = manager_type(
            kv_cache,
            config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            hash_block_size=config.hash_block_size,
            enable_caching=config.enable_prefix_caching,
            use_eagle=config.use_eagle,
            watermark=config.watermark,
            retention_interval=config.retention_interval,
            events=_event_log(config),
            observer=self._residency,
        )
        self.block_hasher: BlockHasher | None = None
        if config.enable_prefix_caching:
            self.block_hasher = make_block_hasher(
                self.kv_cache_manager.hash_block_size,
                config.prefix_caching_hash_algo,
                config.key_format,
            )
        self._state = SchedulerState(
            config=config,
            kv_cache_manager=self.kv_cache_manager,
            encoder=EncoderScheduler(config),
            fence=StepFence(self.kv_cache_manager),
            waiting=create_request_queue(config.policy),
        )
        self._clock = clock
        self._publish_kv_events = publish_kv_events
        self._previous_step: frozenset[str] = frozenset()

    @property
    def running_req_ids(self) -> list[str]:
        """Ids of the running requests, in order of admission."""
        return [request.request_id for request in self._state.running]

    @property
    def waiting_req_ids(self) -> list[str]:
        """Ids of the waiting requests, in the order in which they will be admitted."""
        return [request.request_id for request in self._state.waiting]

    def is_paused(self, req_id: str) -> bool:
        """Whether the request is a session between two turns."""
        return req_id in self._state.paused

    def add_request(self, request: Request) -> None:
        """Queue a request; it gets this scheduler's block hasher unless it has one.

        Raises ValueError, changing nothing, for an id in use and for a request that could never
        run with these settings.
        """
        state = self._state
        if request.request_id in state.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        check_length(
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            self.config,
            self.kv_cache_manager,
        )
        state.encoder.check_fits(request.request_id, request.mm_features)
        if request.arrival_time is None:
            request.arrival_time = self._clock()
        if self.block_hasher is not None and not request.has_block_hasher:
            request.attach_block_hasher(self.block_hasher)
        state.requests[request.request_id] = request
        state.waiting.add(request)

    def abort_request(self, req_id: str) -> bool:
        """End a request now; False, changing nothing, if it is unknown or ended."""
        request = self._state.requests.get(req_id)
        if request is None:
            return False
        self._state.finish(request, RequestStatus.FINISHED_ABORTED)
        return True

    def continue_session(
        self,
        req_id: str,
        token_ids: Sequence[int],
        mm_features: Sequence[MultimodalFeature] = (),
        sampling_params: SamplingParams | None = None,
    ) -> None:
        """Begin the next turn of a paused session (`Request.continue_session`).

        End a session with `abort_request`. Raises ValueError, changing nothing, unless the
        session is paused, and for a turn that could never run with these settings.
        """
        request = self._state.paused.get(req_id)
        if request is None:
            raise ValueError(f"request {req_id!r} is not a paused session")
        params = sampling_params or request.sampling_params or SamplingParams()
        num_prompt = min(request.num_computed_tokens, request.num_tokens) + len(token_ids)
        check_length(req_id, num_prompt, params.max_tokens, self.config, self.kv_cache_manager)
        self._state.encoder.check_fits(req_id, mm_features)
        request.continue_session(token_ids, mm_features)
        request.sampling_params = params
        self._state.resume(request)

    def has_unfinished_requests(self) -> bool:
        """Whether requests wait or run; sessions between two turns do not count."""
        return bool(self._state.running or self._state.waiting)

    def has_finished_requests(self) -> bool:
        """Whether the worker must still be told about ended requests: schedule once more."""
        return bool(self._state.finished_req_ids)

    def schedule(self) -> SchedulerOutput:
        """The next step; empty if nothing can run."""
        state = self._state
        plan = StepScheduler(state).run()
        output = build_output(state, plan, self._previous_step)
        for req_id, num_tokens in plan.num_scheduled_tokens.items():
            # Counted already, so that the next step can be scheduled at once.
            request = state.requests[req_id]
            request.num_computed_tokens += num_tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        state.fence.step_scheduled(plan.num_scheduled_tokens)
        self._previous_step = frozenset(plan.num_scheduled_tokens)
        state.finished_req_ids = set()
        state.preempted_req_ids = set()
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled_token_ids: Mapping[str, Sequence[int]]
    ) -> StepResult:
        """Take in a step's sampled tokens; steps must come back in the order of `schedule`.

        A request still in its prompt must have none. Requests aborted meanwhile are passed over.
        Raises ValueError, changing nothing, for a step that is not the oldest in flight, and for
        tokens of a request that it did not schedule or that is still prefilling.
        """
        self._check_sampled(output, sampled_token_ids)
        if output.num_scheduled_tokens:
            self._state.fence.check_is_next(output.num_scheduled_tokens.keys())
            self._state.fence.step_came_back()
        results = []
        for req_id in output.num_scheduled_tokens:
            request = self._state.requests.get(req_id)
            if request is None:
                continue
            tokens = list(sampled_token_ids.get(req_id, ()))
            num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            if num_drafts and tokens and request.num_computed_tokens:
                # One token is sampled anyway; every further one is an accepted draft.
                request.num_computed_tokens -= num_drafts + 1 - len(tokens)
            if request.mm_features:
                self._state.encoder.release_passed(request)
            result = self._take_tokens(request, tokens)
            if result is not None:
                results.append(result)
        events = self.kv_cache_manager.take_events()
        if events and self._publish_kv_events is not None:
            self._publish_kv_events(events)
        return StepResult(results, events)

    def update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Draft tokens that the next step verifies; ignored for requests that are prefilling."""
        for req_id, drafts in draft_token_ids.items():
            request = self._state.requests.get(req_id)
            if request is not None and not request.is_prefill_chunk:
                request.spec_token_ids = list(drafts)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Make every later lookup miss: after new weights, or when KV was discarded.

        Without `reset_running_requests`, False and no change while requests hold blocks. With
        it, all running requests are preempted, and recompute their tokens to equal outputs
        (public issues 12284, 28827); RuntimeError, changing nothing, while a step is in flight or
        a session that does not run holds blocks.
        """
        state = self._state
        if reset_running_requests:
            if state.fence.num_steps_in_flight:
                raise RuntimeError(
                    "reset_running_requests needs every scheduled step to have come back through "
                    f"update_from_output; {state.fence.num_steps_in_flight} have not"
                )
            if sessions := state.idle_sessions():
                raise RuntimeError(f"sessions {sessions} hold blocks: end or continue them first")
            while state.running:
                state.preempt(state.running.pop())
            self._previous_step = frozenset()
        return self.kv_cache_manager.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Forget every encoder output, after new weights. RuntimeError while requests run."""
        if self._state.running:
            raise RuntimeError(
                f"{len(self._state.running)} running requests may need encoder outputs: "
                "reset the prefix cache with reset_running_requests=True first"
            )
        self._state.encoder.cache.reset()

    def make_stats(self) -> SchedulerStats:
        """State now, and what happened since the last call."""
        state = self._state
        num_preemptions, state.num_preemptions = state.num_preemptions, 0
        return SchedulerStats(
            num_running_reqs=len(state.running),
            num_waiting_reqs=len(state.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
            num_preemptions=num_preemptions,
            eviction_samples=self._residency.take_samples() if self._residency else [],
        )

    def _check_sampled(
        self, output: SchedulerOutput, sampled_token_ids: Mapping[str, Sequence[int]]
    ) -> None:
        for req_id, tokens in sampled_token_ids.items():
            if req_id not in output.num_scheduled_tokens:
                raise ValueError(f"request {req_id!r} was not scheduled in this step")
            request = self._state.requests.get(req_id)
            if request is None or not tokens or request.status is not RequestStatus.RUNNING:
                continue
            if request.is_prefill_chunk:
                raise ValueError(
                    f"request {req_id!r} cannot have sampled tokens: only "
                    f"{request.num_computed_tokens} of its {request.num_tokens} are computed"
                )

    def _take_tokens(self, request: Request, tokens: list[int]) -> RequestOutput | None:
        """Append tokens up to the one that ends the request; None if the step brought nothing."""
        end = None
        taken: list[int] = []
        if request.pooling_params is not None:
            if not request.is_prefill_chunk:
                end = RequestStatus.FINISHED_STOPPED
        else:
            for token in tokens:
                request.append_output_token_ids(token)
                taken.append(token)
                end = _end_of_generation(request, self.config.max_model_len)
                if end is not None:
                    break
        if end is None and not taken:
            return None
        finish_reason = None if end is None else FINISH_REASONS[end]
        if end is not None and request.resumable:
            self._state.pause(request)
        elif end is not None:
            self._state.finish(request, end)
        return RequestOutput(request.request_id, taken, finish_reason)


def _event_log(config: SchedulerConfig) -> KVEventLog | None:
    if not config.enable_kv_cache_events:
        return None
    return KVEventLog(config.key_format, use_int_block_hashes=config.use_int_block_hashes)


def _end_of_generation(request: Request, max_model_len: int) -> RequestStatus | None:
    """Why the request ends with its last token, None if it goes on."""
    params = request.sampling_params
    assert params is not None
    if request.num_output_tokens < params.min_tokens:
        return None
    if request.all_token_ids[-1] in params.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= max_model_len or request.num_output_tokens >= params.max_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
