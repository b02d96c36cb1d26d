"""Continuous batching: budgets, chunks, admission, preemption, ends (spec kv 6)."""

import pytest

from slotmirror.kvcache.request import (
    FinishReason,
    PoolingParams,
    Request,
    RequestStatus,
    SamplingParams,
)
from slotmirror.kvcache.specs import FullAttentionSpec, KVCacheGroupSpec
from support.kv_builders import due_tokens, make_scheduler, run_to_end


def request(req_id, num_tokens, max_tokens=4, first=0, **options):
    return Request(
        req_id,
        range(first, first + num_tokens),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        **options,
    )


def start(scheduler, *requests):
    for each in requests:
        scheduler.add_request(each)
    return {each.request_id: each for each in requests}


def step(scheduler, known):
    output = scheduler.schedule()
    return output, scheduler.update_from_output(output, due_tokens(output, known))


def test_a_step_shares_its_budget_in_order():
    """Running requests first, then admissions, each as much as is left; prompts in chunks."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    known = start(scheduler, request("a", 10), request("b", 20, first=100))
    output, _ = step(scheduler, known)
    assert output.num_scheduled_tokens == {"a": 10, "b": 6}
    output, _ = step(scheduler, known)
    assert output.num_scheduled_tokens == {"a": 1, "b": 14}
    assert output.scheduled_cached_reqs.num_computed_tokens == [10, 6]


def test_outputs_describe_the_tables():
    """New: the whole table and the hits; running: new blocks, None if there are none."""
    scheduler = make_scheduler()
    known = start(scheduler, request("a", 8), request("b", 9))
    output, _ = step(scheduler, known)
    first, second = output.scheduled_new_reqs
    assert (first.block_ids, first.num_computed_tokens) == (([1, 2],), 0)
    assert (second.block_ids, second.num_computed_tokens) == (([1, 2, 3],), 8)
    assert second.prompt_token_ids == list(range(9))
    assert output.num_common_prefix_blocks == [2]
    output, _ = step(scheduler, known)
    assert output.scheduled_cached_reqs.new_block_ids == [([4],), None]
    assert output.scheduled_cached_reqs.all_token_ids == {}
    assert output.scheduled_cached_reqs.num_output_tokens == [1, 1]


def test_long_prefill_threshold_limits_chunks():
    """A long prompt gets at most the threshold per step, so that short ones pass it."""
    scheduler = make_scheduler(long_prefill_token_threshold=6)
    known = start(scheduler, request("long", 30), request("short", 5, first=100))
    for expected in ({"long": 6, "short": 5}, {"long": 6, "short": 1}):
        output, _ = step(scheduler, known)
        assert output.num_scheduled_tokens == expected


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget():
    """The second prompt does not fit into what is left of the step."""
    scheduler = make_scheduler(max_num_batched_tokens=16, enable_chunked_prefill=False)
    known = start(scheduler, request("a", 10), request("b", 10, first=100))
    assert step(scheduler, known)[0].num_scheduled_tokens == {"a": 10}
    assert step(scheduler, known)[0].num_scheduled_tokens == {"a": 1, "b": 10}


def test_at_most_max_num_seqs_run():
    """The third request waits until one ends."""
    scheduler = make_scheduler(max_num_seqs=2)
    known = start(scheduler, *(request(name, 4, 1, first=10 * i) for i, name in enumerate("abc")))
    assert list(step(scheduler, known)[0].num_scheduled_tokens) == ["a", "b"]
    assert scheduler.waiting_req_ids == ["c"]
    output, _ = step(scheduler, known)
    assert list(output.num_scheduled_tokens) == ["c"]
    assert output.finished_req_ids == {"a", "b"}


def test_a_refused_admission_holds_the_queue():
    """Head of line: a small request does not overtake a large one that finds no blocks."""
    scheduler = make_scheduler(num_blocks=9)
    known = start(
        scheduler, request("a", 15, 2), request("large", 20, 2, 100), request("small", 4, 2, 200)
    )
    assert list(step(scheduler, known)[0].num_scheduled_tokens) == ["a"]
    assert scheduler.waiting_req_ids == ["large", "small"]


def test_fcfs_preempts_the_last_admitted():
    """The victim loses its blocks, waits at the front and resumes with a replaced table."""
    scheduler = make_scheduler(num_blocks=8)
    known = start(scheduler, request("a", 12, 8), request("b", 12, 8, first=100))
    step(scheduler, known)
    output, _ = step(scheduler, known)
    assert output.preempted_req_ids == {"b"}
    assert list(output.num_scheduled_tokens) == ["a"]
    assert scheduler.waiting_req_ids == ["b"]
    assert (known["b"].status, known["b"].num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    while not output.scheduled_cached_reqs.resumed_req_ids:
        output, _ = step(scheduler, known)
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == ["b"]
    assert cached.num_computed_tokens == [8]
    assert cached.all_token_ids == {"b": [*range(100, 112), 7]}
    assert len(cached.new_block_ids[0][0]) == 4


def test_nothing_is_admitted_in_a_step_that_preempts():
    """A waiting request does not take the blocks that a victim gave up."""
    scheduler = make_scheduler(num_blocks=8)
    known = start(scheduler, request("a", 12, 8), request("b", 12, 8, first=100))
    step(scheduler, known)
    known |= start(scheduler, request("c", 2, 2, first=200))
    output, _ = step(scheduler, known)
    assert output.scheduled_new_reqs == []


def test_priority_admits_and_keeps_the_smallest_value():
    """The urgent request overtakes in the queue, and the least urgent is preempted, however long
    it has been running."""
    scheduler = make_scheduler(num_blocks=8, policy="priority")
    late = request("late", 12, 8, priority=5, arrival_time=0.0)
    known = start(scheduler, late)
    step(scheduler, known)
    known |= start(
        scheduler,
        request("calm", 11, 8, 100, priority=3, arrival_time=1.0),
        request("urgent", 11, 8, 200, priority=1, arrival_time=2.0),
    )
    assert scheduler.waiting_req_ids == ["urgent", "calm"]
    output, _ = step(scheduler, known)
    assert [new.req_id for new in output.scheduled_new_reqs] == ["urgent"]
    preempted = set()
    while not preempted:
        output, _ = step(scheduler, known)
        preempted = output.preempted_req_ids
    assert preempted == {"late"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_all_requests_end_with_all_their_tokens(policy):
    """Twelve requests over a pool that holds two: everyone ends at its length."""
    scheduler = make_scheduler(num_blocks=9, policy=policy, max_num_batched_tokens=12)
    requests = [
        request(f"r{i}", 6 + i % 5, 5 + i % 3, first=20 * i, priority=i % 2) for i in range(12)
    ]
    start(scheduler, *requests)
    finished = run_to_end(scheduler, requests)
    assert len(finished) == 12
    assert {output.finish_reason for output in finished} == {FinishReason.LENGTH}
    assert all(each.num_output_tokens == each.max_tokens for each in requests)
    assert scheduler.make_stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason"),
    [
        (SamplingParams(max_tokens=9, stop_token_ids=frozenset({5})), [4, 5, 6], [4, 5], "stop"),
        (SamplingParams(max_tokens=2), [4, 5, 6], [4, 5], "length"),
        (
            SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({5})),
            [5, 5, 6],
            [5, 5],
            "stop",
        ),
    ],
)
def test_ends_of_generation(params, tokens, kept, reason):
    """Stop tokens, the length, and no stop before the least number of tokens; what comes after
    the last token is dropped."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("r", range(4), sampling_params=params))
    output = scheduler.schedule()
    (result,) = scheduler.update_from_output(output, {"r": tokens}).finished
    assert (result.new_token_ids, result.finish_reason) == (kept, reason)


def test_the_model_length_ends_a_request():
    """A prompt of 126 tokens in a model of 128 gives two tokens."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=128)
    long = request("r", 126, max_tokens=50)
    start(scheduler, long)
    (result,) = run_to_end(scheduler, [long])
    assert result.finish_reason == FinishReason.LENGTH
    assert long.num_tokens == 128


def test_pooling_requests_end_with_their_prompt():
    """No token is sampled; the request ends with the step that computed its last token."""
    scheduler = make_scheduler(max_num_batched_tokens=8)
    pooling = Request("p", range(12), pooling_params=PoolingParams())
    scheduler.add_request(pooling)
    assert scheduler.update_from_output(scheduler.schedule(), {}).finished == []
    (result,) = scheduler.update_from_output(scheduler.schedule(), {}).finished
    assert (result.new_token_ids, result.finish_reason) == ([], FinishReason.STOP)


def test_aborted_requests_leave_at_once():
    """Running or waiting: blocks are free again, the worker is told with the next step, and a
    second abort is no news."""
    scheduler = make_scheduler(max_num_seqs=1)
    known = start(scheduler, request("a", 8), request("b", 8, first=100))
    step(scheduler, known)
    assert scheduler.abort_request("a")
    assert scheduler.abort_request("b")
    assert not scheduler.abort_request("a")
    assert not scheduler.has_unfinished_requests()
    assert scheduler.has_finished_requests()
    assert scheduler.kv_cache_manager.usage == 0.0
    output = scheduler.schedule()
    assert output.finished_req_ids == {"a", "b"}
    assert output.total_num_scheduled_tokens == 0
    assert not scheduler.has_finished_requests()


def test_resumed_requests_can_be_told_as_new():
    """The form of model runner V2: a resumed request comes as new, with all its tokens."""
    scheduler = make_scheduler(num_blocks=8, resumed_as_new=True)
    known = start(scheduler, request("a", 12, 8), request("b", 12, 8, first=100))
    output, _ = step(scheduler, known)
    assert output.scheduled_new_reqs[0].prefill_token_ids == list(range(12))
    output, _ = step(scheduler, known)
    while not output.scheduled_new_reqs:
        output, _ = step(scheduler, known)
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("b", 8)
    assert new.prefill_token_ids == [*range(100, 112), 7]
    assert output.scheduled_cached_reqs.resumed_req_ids == set()


def test_stats_per_step():
    """State now; hits and preemptions since the last call."""
    scheduler = make_scheduler(max_num_seqs=1, num_blocks=9)
    known = start(scheduler, request("a", 8, 1), request("b", 8, 1))
    step(scheduler, known)
    stats = scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 1)
    assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.hits) == (1, 0)
    step(scheduler, known)
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_stats.queries, stats.prefix_cache_stats.hits) == (8, 4)
    assert stats.kv_cache_usage == 0.0


@pytest.mark.parametrize("issue", ["25538", "28018", "44594"])
def test_issue_a_watermark_saves_preemptions(issue):
    """Long outputs whose demand is 1.5 times the pool: fewer preemptions than without."""

    def preemptions(watermark):
        scheduler = make_scheduler(num_blocks=41, watermark=watermark)
        requests = [request(f"r{i}", 8, 32, first=40 * i) for i in range(20)]
        start(scheduler, *requests)
        run_to_end(scheduler, requests)
        return scheduler.make_stats().num_preemptions

    assert preemptions(0.3) < preemptions(0.0)


def test_non_causal_groups_switch_caching_and_chunks_off():
    """Bidirectional attention: no hasher, no hits, prompts whole."""
    from slotmirror.engine.scheduler import Scheduler
    from slotmirror.engine.scheduling.config import SchedulerConfig

    config = SchedulerConfig(num_blocks=32, block_size=4, max_num_batched_tokens=16)
    scheduler = Scheduler(config, [KVCacheGroupSpec(FullAttentionSpec(4, non_causal=True))])
    assert scheduler.block_hasher is None
    assert not scheduler.config.enable_prefix_caching
    known = start(scheduler, request("a", 10), request("b", 10))
    assert step(scheduler, known)[0].num_scheduled_tokens == {"a": 10}
    assert step(scheduler, known)[0].scheduled_new_reqs[0].num_computed_tokens == 0


def test_kv_events_come_with_the_step():
    """Events of a step's registrations are returned by its update, once."""
    scheduler = make_scheduler(enable_kv_cache_events=True)
    known = start(scheduler, request("a", 8))
    _, result = step(scheduler, known)
    assert [len(event.block_hashes) for event in result.events] == [2]
    _, result = step(scheduler, known)
    assert result.events == []


def test_residency_samples_come_with_the_stats():
    """With sampling on, evicted blocks are reported by `make_stats`."""
    scheduler = make_scheduler(num_blocks=6, kv_metrics_sample_rate=1.0)
    requests = [request(f"r{i}", 12, 4, first=20 * i) for i in range(3)]
    start(scheduler, *requests)
    run_to_end(scheduler, requests)
    assert scheduler.make_stats().eviction_samples
    assert scheduler.make_stats().eviction_samples == []


def test_issue_40896_hits_do_not_change_what_is_computed_for():
    """A cold and a warm run ask the model for the same tokens in the end."""
    scheduler = make_scheduler()
    cold, warm = request("cold", 17), request("warm", 17)
    for each in (cold, warm):
        start(scheduler, each)
        run_to_end(scheduler, [each])
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 16)
    assert cold.all_token_ids == warm.all_token_ids
