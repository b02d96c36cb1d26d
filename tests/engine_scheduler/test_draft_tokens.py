"""Speculative decoding as far as scheduling and the KV cache go (spec kv 4, 6)."""

from slotmirror.kvcache.request import Request, SamplingParams
from support.kv_builders import make_scheduler


def started(**options):
    """A scheduler whose only request has computed its 7 prompt tokens and sampled one."""
    scheduler = make_scheduler(num_speculative_tokens=2, **options)
    request = Request("r", range(7), sampling_params=SamplingParams(max_tokens=9))
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), {"r": [50]})
    return scheduler, request


def test_drafts_are_scheduled_with_the_sampled_token():
    """One known token and two drafts; rejected ones are not computed after all."""
    scheduler, request = started()
    scheduler.update_draft_token_ids({"r": [51, 52]})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"r": 3}
    assert output.scheduled_spec_decode_tokens == {"r": [51, 52]}
    scheduler.update_from_output(output, {"r": [51, 60]})
    assert request.output_token_ids == [50, 51, 60]
    assert request.num_computed_tokens == 9
    assert scheduler.schedule().scheduled_cached_reqs.num_computed_tokens == [9]


def test_a_block_of_drafts_cannot_be_hit():
    """The block that drafts would complete is registered only when its tokens are known."""
    scheduler, _ = started()
    scheduler.update_draft_token_ids({"r": [51, 52]})
    pool = scheduler.kv_cache_manager.pool
    output = scheduler.schedule()
    assert pool.num_cached_keys == 2
    scheduler.update_from_output(output, {"r": [51, 52, 53]})
    scheduler.schedule()
    assert pool.num_cached_keys == 2


def test_drafts_are_ignored_while_prefilling_or_unknown():
    """Drafts for a prompt in chunks or for a stranger have no effect."""
    scheduler = make_scheduler(num_speculative_tokens=2, max_num_batched_tokens=4)
    scheduler.add_request(Request("r", range(7)))
    scheduler.update_from_output(scheduler.schedule(), {})
    scheduler.update_draft_token_ids({"r": [51], "nobody": [51]})
    assert scheduler.schedule().scheduled_spec_decode_tokens == {}


def test_a_draft_head_gets_slots_ahead():
    """With EAGLE, slots for the next drafts are allocated before they are known."""
    scheduler, _ = started(use_eagle=True)
    assert scheduler.kv_cache_manager.get_block_ids("r") == ([1, 2, 3],)


def test_a_preempted_request_forgets_its_drafts():
    """They were guesses about a state that is gone."""
    scheduler, request = started()
    scheduler.update_draft_token_ids({"r": [51, 52]})
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.spec_token_ids == []
    assert scheduler.schedule().num_scheduled_tokens == {"r": 8}
