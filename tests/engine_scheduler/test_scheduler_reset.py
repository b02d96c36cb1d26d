"""Forced resets, steps in flight, sessions, memory (scenarios 29, 30, 36)."""

import gc
from collections.abc import Iterable

import pytest

from slotmirror.kvcache.request import MultimodalFeature, Request, SamplingParams
from support.kv_builders import due_tokens, make_scheduler, run_to_end


def request(req_id, num_tokens=8, max_tokens=4, first=0, **options):
    return Request(
        req_id,
        range(first, first + num_tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        **options,
    )


@pytest.mark.parametrize("issue", ["12284", "28827"])
def test_issue_reset_with_running_requests(issue):
    """Refused and without effect while a request runs; forced, all are preempted, nothing hits,
    and the outputs are what they would have been."""
    scheduler = make_scheduler()
    requests = [request("a", 9), request("b", 9, first=50)]
    for each in requests:
        scheduler.add_request(each)
    known = {each.request_id: each for each in requests}
    output = scheduler.schedule()
    scheduler.update_from_output(output, due_tokens(output, known))
    assert not scheduler.reset_prefix_cache()
    assert scheduler.running_req_ids == ["a", "b"]

    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.waiting_req_ids == ["a", "b"]
    assert scheduler.make_stats().prefix_cache_stats.reset
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"a", "b"}
    assert output.scheduled_cached_reqs.num_computed_tokens == [0, 0]
    assert output.scheduled_cached_reqs.all_token_ids.keys() == {"a", "b"}
    scheduler.update_from_output(output, due_tokens(output, known))
    run_to_end(scheduler, requests)
    assert [each.output_token_ids for each in requests] == [[7] * 4, [7] * 4]


def test_forced_reset_waits_for_steps_in_flight():
    """A step that still writes blocks makes it an error that changes nothing."""
    scheduler = make_scheduler()
    scheduler.add_request(request("a"))
    output = scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"update_from_output; 1 have not"):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.running_req_ids == ["a"]
    scheduler.update_from_output(output, {"a": [7]})
    assert scheduler.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("issue", ["45357", "14055", "13501"])
def test_issue_blocks_of_a_step_in_flight_are_not_handed_out(issue):
    """A request is aborted while a step writes its blocks: nobody gets them before the step came
    back, then they are free, tail first."""
    scheduler = make_scheduler(num_blocks=7)
    scheduler.add_request(request("a", 12))
    output = scheduler.schedule()
    scheduler.abort_request("a")
    pool = scheduler.kv_cache_manager.pool
    assert list(pool.free_queue) == [4, 5, 6]
    scheduler.add_request(request("b", 14, first=50))
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    scheduler.update_from_output(output, {})
    assert list(pool.free_queue) == [4, 5, 6, 3, 2, 1]
    assert scheduler.schedule().num_scheduled_tokens == {"b": 14}


@pytest.mark.parametrize("issue", ["45357"])
def test_issue_several_steps_in_flight(issue):
    """Blocks wait for the last step that computes the request, not for the first to return."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(request("a", 16))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 8}, {"a": 8})
    scheduler.abort_request("a")
    scheduler.update_from_output(first, {})
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 31 - 4
    scheduler.update_from_output(second, {})
    assert scheduler.kv_cache_manager.pool.num_free_blocks == 31


def turn(scheduler, session):
    """Run until the session pauses; the last turn's output."""
    (result,) = run_to_end(scheduler, [session])
    return result


def test_a_session_pauses_and_goes_on_with_its_blocks():
    """The second turn computes only what is new: the dropped token's place and the new tokens."""
    scheduler = make_scheduler()
    session = request("s", 6, 3, resumable=True)
    scheduler.add_request(session)
    assert turn(scheduler, session).finish_reason == "length"
    assert scheduler.is_paused("s")
    assert scheduler.kv_cache_manager.get_block_ids("s") == ([1, 2],)

    scheduler.continue_session("s", [50, 51, 52], sampling_params=SamplingParams(max_tokens=1))
    output = scheduler.schedule()
    (new,) = output.scheduled_new_reqs
    assert (new.num_computed_tokens, new.block_ids) == (8, ([1, 2, 3],))
    assert new.prompt_token_ids == [*range(6), 7, 7, 50, 51, 52]
    assert output.num_scheduled_tokens == {"s": 3}
    scheduler.update_from_output(output, {"s": [7]})
    assert scheduler.abort_request("s")
    assert scheduler.kv_cache_manager.usage == 0.0
    assert scheduler.schedule().finished_req_ids == {"s"}


@pytest.mark.parametrize("issue", ["49377", "49449"])
def test_issue_other_requests_do_not_hit_a_dropped_token(issue):
    """X2: the dropped token would have completed a block. Whoever has it in its prompt must not
    get the block that the session then filled with something else."""
    scheduler = make_scheduler()
    session = request("s", 6, 2, resumable=True)
    scheduler.add_request(session)
    turn(scheduler, session)
    scheduler.continue_session("s", [50] * 5, sampling_params=SamplingParams(max_tokens=1))
    turn(scheduler, session)
    other = Request("o", [*range(6), 7, 7, 50, 50])
    scheduler.add_request(other)
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 4


def test_sessions_hold_places_and_block_resets():
    """A paused session counts among the running ones, and its blocks cannot be reset."""
    scheduler = make_scheduler(max_num_seqs=1)
    session = request("s", 6, 1, resumable=True)
    scheduler.add_request(session)
    turn(scheduler, session)
    scheduler.add_request(request("a", first=50))
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    with pytest.raises(RuntimeError, match=r"sessions \['s'\] hold blocks"):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.abort_request("s")
    assert scheduler.schedule().num_scheduled_tokens == {"a": 8}


@pytest.mark.parametrize(
    ("req_id", "tokens", "message"),
    [
        ("a", [1], "'a' is not a paused session"),
        ("s", [1] * 200, "leave no room for an output within max_model_len=128"),
    ],
)
def test_turns_that_cannot_be(req_id, tokens, message):
    """Neither strangers nor turns that are too long; the session can go on otherwise."""
    scheduler = make_scheduler()
    session = request("s", 6, 1, resumable=True)
    scheduler.add_request(session)
    turn(scheduler, session)
    with pytest.raises(ValueError, match=message):
        scheduler.continue_session(req_id, tokens)
    assert scheduler.is_paused("s")
    scheduler.continue_session("s", [1])
    assert scheduler.waiting_req_ids == ["s"]


def count_elements(root: object) -> int:
    """Elements of all lists, dictionaries, sets and queues that `root` reaches."""
    seen, pending, total = set(), [root], 0
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type) or callable(value):
            continue
        seen.add(id(value))
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            total += sum(1 for _ in value)
        pending += [
            each
            for each in gc.get_referents(value)
            if gc.is_tracked(each) or isinstance(each, dict | list | set)
        ]
    return total


@pytest.mark.parametrize("issue", ["44490", "28726"])
def test_issue_memory_is_back_at_the_start(issue):
    """X7: after 3,000 requests, aborted ones and images among them, no container of the
    scheduler has grown beyond what it held after the first 30."""
    scheduler = make_scheduler(enable_kv_cache_events=True, kv_metrics_sample_rate=0.5)

    def serve(numbers):
        for i in numbers:
            image = MultimodalFeature(f"image{i % 5}", 1, 3)
            each = request(f"r{i}", 10, 2, first=i % 50, mm_features=[image])
            scheduler.add_request(each)
            if i % 7 == 0:
                scheduler.abort_request(each.request_id)
            run_to_end(scheduler, [each])
        scheduler.schedule()
        scheduler.make_stats()
        assert scheduler.reset_prefix_cache()
        return count_elements(scheduler)

    assert serve(range(30)) >= serve(range(30, 3030))
