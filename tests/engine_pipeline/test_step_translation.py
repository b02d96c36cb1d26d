"""Scheduler outputs as core events: every field, and slots over a whole preempting run."""

import random

import numpy as np
import torch

from slotmirror.core.events import AdmittedRequest
from slotmirror.engine.encoder_outputs import EncoderOutputs
from slotmirror.engine.models.fingerprint import FingerprintModel
from slotmirror.engine.request_states import RequestState, RequestStates
from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from slotmirror.engine.step_batches import make_batch
from slotmirror.engine.step_translation import StepTranslator
from slotmirror.kvcache.request import Request, SamplingParams

BLOCK = 4


def new_request(req_id: str, block_ids: list[int], num_computed: int) -> NewRequestData:
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=[1] * 8,
        mm_features=(),
        sampling_params=None,
        pooling_params=None,
        block_ids=(block_ids,),
        num_computed_tokens=num_computed,
        lora_request=None,
    )


def step(
    new: list[NewRequestData],
    cached: CachedRequestData,
    num_scheduled: dict[str, int],
    finished: frozenset[str] = frozenset(),
    preempted: frozenset[str] = frozenset(),
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[0],
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        free_encoder_mm_hashes=[],
    )


def test_every_field_is_translated() -> None:
    """New, hit, appended, resumed, preempted and ended requests each land in their event field."""
    translator = StepTranslator(num_blocks=16, block_size=BLOCK)
    first = translator.translate(
        step(
            [new_request("a", [1, 2], 0), new_request("b", [1, 3], 4)],
            CachedRequestData(),
            {"a": 8, "b": 2},
        )
    )
    assert first.new == (AdmittedRequest("a", 0, [1, 2]), AdmittedRequest("b", 4, [1, 3]))
    assert first.slots.tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    cached = CachedRequestData(
        req_ids=["a", "b"],
        resumed_req_ids={"b"},
        new_block_ids=[([5],), ([1, 7],)],
        num_computed_tokens=[8, 4],
    )
    second = translator.translate(step([], cached, {"a": 1, "b": 3}, preempted=frozenset("b")))
    assert second.preempted == ("b",)
    assert second.resumed == (AdmittedRequest("b", 4, [1, 7]),)
    assert second.new == ()
    assert second.req_ids == ("a", "b")
    assert second.first_positions.tolist() == [8, 4]
    assert second.num_tokens.tolist() == [1, 3]
    assert second.slots.tolist() == [20, 28, 29, 30]
    unchanged = CachedRequestData(req_ids=["b"], new_block_ids=[None], num_computed_tokens=[7])
    third = translator.translate(step([], unchanged, {"b": 1}, finished=frozenset("a")))
    assert third.ended == ("a",)
    assert third.slots.tolist() == [31]
    last = translator.translate(step([], CachedRequestData(), {}, finished=frozenset("b")))
    assert last.ended == ("b",)
    assert last.total_tokens == 0


def test_slots_agree_with_the_runners_own_tables() -> None:
    """Over a run with preemptions and hits, events and the runner's batches name equal slots."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=12,
            block_size=BLOCK,
            max_num_seqs=6,
            max_num_batched_tokens=16,
            max_model_len=44,
            reserve_full_isl=False,
        )
    )
    translator = StepTranslator(num_blocks=12, block_size=BLOCK)
    states, rng = RequestStates(), random.Random(3)
    model = FingerprintModel(
        num_blocks=12,
        block_size=BLOCK,
        row_widths={},
        num_next_tokens=256,
        needs_full_hidden=True,
        device=torch.device("cpu"),
    )
    for index in range(30):
        tokens = [7] * rng.randrange(1, 12) + [index] * rng.randrange(1, 4)
        params = SamplingParams(max_tokens=rng.randrange(1, 20))
        scheduler.add_request(Request(f"r{index}", tokens, sampling_params=params))
        states.register(f"r{index}", RequestState(tokens.copy(), prefix_seed=0))
    preemptions = hits = steps = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        events = translator.translate(output)
        states.apply(output)
        preemptions += len(events.preempted)
        hits += sum(admitted.num_computed_tokens > 0 for admitted in (*events.new, *events.resumed))
        steps += 1
        sampled = {}
        if events.total_tokens:
            scheduled = [states[req_id] for req_id in events.req_ids]
            batch = make_batch(output, scheduled, EncoderOutputs(model), BLOCK)
            assert np.array_equal(events.slots, batch.slots)
            assert np.array_equal(events.first_positions, batch.first_positions)
            sampled = {
                events.req_ids[index]: [scheduled[index].append_decoded(index)]
                for index in np.flatnonzero(batch.samples).tolist()
            }
        scheduler.update_from_output(output, sampled)
        assert steps < 2000
    assert preemptions > 20
    assert hits > 20
