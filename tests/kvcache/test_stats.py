"""Hit statistics are counted once, at admission (X5; scenarios 34, 35)."""

import pytest

from slotmirror.kvcache.request import SamplingParams
from slotmirror.kvcache.stats import PrefixCacheStats, RecentHitRate
from support.kv_builders import admit, make_manager, make_request, preempt


@pytest.mark.parametrize("issue", ["43736", "45202", "48860"])
def test_issue_failed_admissions_do_not_count(issue):
    """A waiting request that is looked up and refused five times counts once, when admitted."""
    manager = make_manager(6)
    busy = make_request("busy", [9] * 16)
    admit(manager, busy)
    request = make_request("r", range(8))
    for _ in range(5):
        assert admit(manager, request) is None
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=16)
    manager.free(busy)
    admit(manager, request)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=8)


@pytest.mark.parametrize("issue", ["25780"])
def test_issue_resumed_requests_count_apart(issue):
    """The hits of a preempted request on its own blocks leave the normal hit rate at 0."""
    manager, rate = make_manager(), RecentHitRate()
    request = make_request("r", range(13))
    admit(manager, request)
    preempt(manager, request)
    admit(manager, request)
    stats = manager.make_prefix_cache_stats()
    rate.observe(stats)
    assert (stats.requests, stats.queries, stats.hits) == (1, 13, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 13, 12)
    assert rate.rate == 0.0


def test_chunks_and_decodes_do_not_count():
    """Only the first allocation of a request is an admission."""
    manager = make_manager()
    request = make_request("r", range(12))
    admit(manager, request, 4)
    manager.allocate_slots(request, 8)
    assert manager.make_prefix_cache_stats().requests == 1


def test_requests_that_do_not_read_do_not_count():
    """They were never looked up; neither is anybody with caching off."""
    manager = make_manager()
    params = SamplingParams(prompt_logprobs=1)
    admit(manager, make_request("r", range(8), sampling_params=params))
    off = make_manager(enable_caching=False)
    admit(off, make_request("r", range(8)))
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    assert off.make_prefix_cache_stats() == PrefixCacheStats()


def test_cached_tokens_are_those_of_the_first_admission():
    """What a request reports does not change when it is preempted and hits its own blocks."""
    manager = make_manager()
    request = make_request("r", range(13))
    assert request.num_cached_tokens is None
    admit(manager, request)
    preempt(manager, request)
    admit(manager, request)
    assert request.num_cached_tokens == 0


def test_recent_hit_rate_forgets_old_requests():
    """Over the last requests only; a reset of the cache starts anew."""
    rate = RecentHitRate(max_requests=2)
    assert rate.rate == 0.0
    for hits in (10, 5, 0):
        rate.observe(PrefixCacheStats(requests=1, queries=10, hits=hits))
    assert rate.rate == 0.25
    rate.observe(PrefixCacheStats(preempted_requests=1, preempted_queries=10, preempted_hits=10))
    assert rate.rate == 0.25
    rate.observe(PrefixCacheStats(reset=True, requests=1, queries=10, hits=1))
    assert rate.rate == 0.1
