"""What a lookup finds (spec kv 2, scenarios 14-18)."""

import pytest

from slotmirror.kvcache.request import PoolingParams, SamplingParams
from support.kv_builders import admit, make_manager, make_request, num_hits, snapshot


def cached(num_tokens=16, **options):
    """A manager that holds the blocks of a finished request of this many tokens."""
    manager = make_manager(**options)
    request = make_request("old", range(num_tokens))
    admit(manager, request)
    manager.free(request)
    return manager


@pytest.mark.parametrize(("length", "hits"), [(16, 12), (17, 16), (15, 12), (4, 0), (5, 4)])
def test_issue_11186_the_last_token_is_always_computed(length, hits):
    """Of k whole cached blocks k - 1 hit, so that the last token gives logits."""
    assert num_hits(cached(), make_request("new", range(length))) == hits


def test_issue_11186_the_chain_is_intact_after_the_recomputed_block():
    """The recomputed last block is a second copy; a longer prompt hits through the first."""
    manager = cached()
    request = make_request("new", range(16))
    admit(manager, request)
    assert manager.get_block_ids("new") == ([1, 2, 3, 5],)
    assert manager.get_computed_blocks(make_request("long", range(17))) == (([1, 2, 3, 4],), 16)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_params": SamplingParams(prompt_logprobs=1)},
        {"pooling_params": PoolingParams("token_embed")},
    ],
)
@pytest.mark.parametrize("issue", ["3251", "3914", "8268", "13105", "5344", "28194"])
def test_issue_requests_for_every_prompt_token_do_not_read(issue, options):
    """Prompt logprobs and token-level pooling compute the whole prompt; a plain repeat hits."""
    manager = cached()
    assert num_hits(manager, make_request("all", range(16), **options)) == 0
    assert num_hits(manager, make_request("plain", range(16))) == 12


def test_issue_28194_requests_that_do_not_read_still_write():
    """The blocks of a token-level pooling request can be hit by others."""
    manager = make_manager()
    admit(manager, make_request("p", range(9), pooling_params=PoolingParams("token_classify")))
    assert num_hits(manager, make_request("q", range(9))) == 8


@pytest.mark.parametrize("issue", ["54607", "53749"])
def test_issue_a_prefix_shorter_than_a_block_never_hits(issue):
    """Queries count, hits do not, and the least length that can hit is reported."""
    manager = cached(3)
    request = make_request("new", range(3))
    admit(manager, request)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (2, 6, 0)
    assert manager.min_hit_tokens == 4


@pytest.mark.parametrize(("length", "hits"), [(4, 0), (5, 0), (9, 4), (13, 8), (17, 12)])
@pytest.mark.parametrize("issue", ["53670", "51769", "38182"])
def test_issue_a_draft_head_costs_exactly_one_block(issue, length, hits):
    """With EAGLE a repeated prompt hits one block less, and never a negative number."""
    assert num_hits(cached(use_eagle=True), make_request("new", range(length))) == hits


def test_lookup_changes_nothing():
    """Nothing is pinned or counted; the returned blocks may be in the free queue."""
    manager = cached()
    manager.make_prefix_cache_stats()
    before = snapshot(manager)
    (blocks,), hits = manager.get_computed_blocks(make_request("new", range(17)))
    assert (blocks, hits) == ([1, 2, 3, 4], 16)
    assert snapshot(manager) == before
    assert manager.make_prefix_cache_stats().requests == 0


def test_resumed_requests_find_their_outputs_too():
    """The limit counts prompt and output: a preempted request hits generated blocks."""
    manager = make_manager()
    request = make_request("r", range(6))
    admit(manager, request)
    request.append_output_token_ids([50, 51])
    manager.allocate_slots(request, 2)
    manager.free(request)
    request.append_output_token_ids([52])
    assert num_hits(manager, request) == 8


def test_caching_off_finds_nothing():
    """The coordinator for caching off returns nothing, for any number of groups."""
    manager = cached(enable_caching=False)
    request = make_request("new", range(16))
    assert manager.get_computed_blocks(request) == (([],), 0)
    assert manager.coordinator.find_longest_cache_hit(request.block_hashes, 15) == ((), 0)
    assert manager.pool.num_cached_keys == 0
    assert manager.get_num_common_prefix_blocks("new") == [0]


def test_hits_share_blocks_with_running_requests():
    """Blocks are found at scheduling time: a second request of the same step shares them."""
    manager = make_manager()
    admit(manager, make_request("a", range(13)))
    admit(manager, make_request("b", range(13)))
    assert manager.get_block_ids("b") == ([1, 2, 3, 5],)


@pytest.mark.parametrize("issue", ["17103", "16234", "4018", "4917"])
def test_issue_after_a_reset_nothing_hits(issue):
    """Discarded KV or new weights, then the reset: the next lookup finds nothing, and the
    statistics say that there was a reset."""
    manager = cached()
    assert manager.reset_prefix_cache()
    assert num_hits(manager, make_request("new", range(16))) == 0
    assert manager.make_prefix_cache_stats().reset
