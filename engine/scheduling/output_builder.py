"""Turns a step's plan into what the worker is told (spec kv 6)."""

from collections.abc import Set

from slotmirror.engine.scheduling.output import CachedRequestData, NewRequestData, SchedulerOutput
from slotmirror.engine.scheduling.plan import StepPlan
from slotmirror.engine.scheduling.state import SchedulerState
from slotmirror.kvcache.request import Request


def build_output(state: SchedulerState, plan: StepPlan, previous_step: Set[str]) -> SchedulerOutput:
    """The output of a plan, before its tokens count as computed.

    `previous_step` holds the ids scheduled in the step before: the worker has their tokens.
    """
    as_new = state.config.resumed_as_new
    new = plan.new + plan.resumed if as_new else plan.new
    first_running = state.running[0].request_id if state.running else ""
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData.from_request(
                request, plan.new_blocks[request.request_id], with_prefill_tokens=as_new
            )
            for request in new
        ],
        scheduled_cached_reqs=_cached_request_data(
            plan, [] if as_new else plan.resumed, previous_step
        ),
        num_scheduled_tokens=plan.num_scheduled_tokens,
        total_num_scheduled_tokens=sum(plan.num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens=plan.spec_tokens,
        scheduled_encoder_inputs=plan.encoder_inputs,
        num_common_prefix_blocks=state.kv_cache_manager.get_num_common_prefix_blocks(first_running),
        finished_req_ids=state.finished_req_ids,
        preempted_req_ids=state.preempted_req_ids,
        free_encoder_mm_hashes=state.encoder.cache.take_freed(),
    )


def _cached_request_data(
    plan: StepPlan, resumed: list[Request], previous_step: Set[str]
) -> CachedRequestData:
    data = CachedRequestData(resumed_req_ids={request.request_id for request in resumed})
    for request in (*plan.running, *resumed):
        req_id = request.request_id
        blocks = plan.new_blocks[req_id]
        data.req_ids.append(req_id)
        data.new_block_ids.append(blocks if any(blocks) else None)
        data.num_computed_tokens.append(request.num_computed_tokens)
        data.num_output_tokens.append(request.num_output_tokens)
        if req_id not in previous_step:
            data.all_token_ids[req_id] = request.all_token_ids.copy()
    return data
