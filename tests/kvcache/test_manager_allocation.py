"""Slots, their order, their refusal and their return (spec kv 3, 4; scenarios 20-28)."""

import pytest

from slotmirror.kvcache.specs import FullAttentionSpec, SlidingWindowSpec
from support.kv_builders import (
    admit,
    decode,
    free_order,
    make_manager,
    make_request,
    num_hits,
    preempt,
    snapshot,
)


def test_measured_free_order():
    """13 tokens, block 4, 10 blocks: the partial block returns to the front, the tail of the
    chain is evicted before its head."""
    manager = make_manager(10)
    request = make_request("r", range(13))
    assert admit(manager, request) == ([1, 2, 3, 4],)
    manager.free(request)
    assert free_order(manager) == [4, 5, 6, 7, 8, 9, 3, 2, 1]


def test_only_new_blocks_are_returned():
    """A decode step inside a block gets none, the next block one."""
    manager = make_manager()
    request = make_request("r", range(7))
    admit(manager, request)
    assert decode(manager, request, [1]) == ([],)
    assert decode(manager, request, [1]) == ([3],)
    assert manager.get_block_ids("r") == ([1, 2, 3],)


@pytest.mark.parametrize("issue", ["10507"])
def test_issue_hits_are_pinned_before_anything_is_taken(issue):
    """Hit blocks at the front of the queue survive an allocation of all other free blocks."""
    manager = make_manager(5)
    old = make_request("old", range(8))
    admit(manager, old)
    other = make_request("other", [9] * 5)
    admit(manager, other)
    manager.free(old)
    manager.free(other)
    assert free_order(manager) == [4, 2, 1, 3]
    new = make_request("new", [*range(8), *[7] * 8])
    assert admit(manager, new) == ([4, 3],)
    assert manager.get_block_ids("new") == ([1, 2, 4, 3],)


def test_a_refused_allocation_leaves_no_trace():
    """Too few free blocks: None, and tables, counts, hashes and queue are as before."""
    manager = make_manager(6)
    old = make_request("old", range(8))
    admit(manager, old)
    manager.free(old)
    admit(manager, make_request("busy", [9] * 8))
    before = snapshot(manager)
    assert admit(manager, make_request("new", range(21))) is None
    assert snapshot(manager) == before


def test_hits_in_the_free_queue_count_as_need():
    """Three free blocks, two of them hits: one more token block fits, two do not."""
    manager = make_manager(6)
    old = make_request("old", range(8))
    admit(manager, old)
    manager.free(old)
    admit(manager, make_request("busy", [9] * 8))
    assert admit(manager, make_request("two", range(8 + 5))) is None
    assert admit(manager, make_request("one", range(8 + 4))) == ([5],)


@pytest.mark.parametrize("issue", ["42656", "33710"])
def test_issue_partial_blocks_are_reused_first(issue):
    """Many short requests with a partial last block leave the cached prefix alone."""
    manager = make_manager(8)
    prefix = make_request("prefix", range(9))
    admit(manager, prefix)
    manager.free(prefix)
    for i in range(50):
        short = make_request(f"s{i}", [100 + i] * 3)
        admit(manager, short)
        manager.free(short)
    assert num_hits(manager, make_request("again", range(9))) == 8


@pytest.mark.parametrize("issue", ["37307"])
def test_issue_a_long_prompt_must_fit_whole(issue):
    """With the admission gate a prompt is not let in chunk by chunk; without it, it is."""
    manager = make_manager(10)
    admit(manager, make_request("busy", [9] * 24))
    assert admit(manager, make_request("long", range(16)), 4, full_sequence_must_fit=True) is None
    assert admit(manager, make_request("long", range(16)), 4) == ([7],)


@pytest.mark.parametrize("issue", ["25538", "28018", "44594"])
def test_issue_the_watermark_holds_for_admissions_beside_others(issue):
    """10 blocks, 20 %: two stay free when others run; an idle engine admits without it, and a
    running request may use them."""
    manager = make_manager(10, watermark=0.2)
    assert manager.watermark_blocks == 2
    first = make_request("first", range(20))
    assert admit(manager, first, has_scheduled_reqs=False) is not None
    second = make_request("second", [9] * 12)
    assert admit(manager, second, has_scheduled_reqs=True) is None
    assert admit(manager, make_request("small", [8] * 8), has_scheduled_reqs=True) is not None
    assert decode(manager, first, [1] * 8) is not None


def test_the_watermark_holds_for_resumed_requests():
    """A preempted request is an admission too."""
    manager = make_manager(10, watermark=0.2)
    request = make_request("r", range(32))
    admit(manager, request, has_scheduled_reqs=False)
    preempt(manager, request)
    assert admit(manager, request, has_scheduled_reqs=True) is None
    assert admit(manager, request, has_scheduled_reqs=False) is not None


def test_reserved_blocks_are_left():
    """An allocation may not use blocks that are reserved for others."""
    manager = make_manager(6)
    assert admit(manager, make_request("r", range(8)), reserved_blocks=4) is None
    assert admit(manager, make_request("r", range(8)), reserved_blocks=3) is not None


def test_lookahead_slots_are_allocated_within_the_model_length():
    """Draft slots come on top, but never beyond the model's length."""
    manager = make_manager(num_blocks=400)
    assert admit(manager, make_request("r", range(4)), num_lookahead_tokens=1) == ([1, 2],)
    admit(manager, make_request("edge", range(1023)), num_lookahead_tokens=50)
    assert len(manager.get_block_ids("edge")[0]) == 1024 // 4


def test_drafts_are_not_registered():
    """Tokens beyond the known ones may be rejected: their block cannot be hit."""
    manager = make_manager()
    request = make_request("r", range(7))
    admit(manager, request, 7)
    manager.allocate_slots(request, 3)
    assert manager.pool.num_cached_keys == 1
    decode(manager, request, [7])
    assert manager.pool.num_cached_keys == 2


def test_external_tokens_get_blocks_and_are_registered_when_loaded():
    """A connector's tokens: blocks at once, hashes only when it says so."""
    manager = make_manager()
    request = make_request("r", range(13))
    hits, num_local = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(
        request, 0, num_local, hits, num_external_computed_tokens=12, delay_cache_blocks=True
    )
    assert new_blocks == ([],)
    assert manager.get_block_ids("r") == ([1, 2, 3],)
    assert manager.pool.num_cached_keys == 0
    manager.register_full_blocks(request, 8)
    assert num_hits(manager, make_request("s", range(13))) == 8


def test_external_tokens_of_a_running_request_only_get_slots():
    """Its table goes on where it is; nothing is pinned a second time."""
    manager = make_manager()
    request = make_request("r", range(9))
    admit(manager, request)
    request.append_output_token_ids([50] * 5)
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=4) == ([4],)
    assert [manager.pool.ref_counts[block] for block in (1, 2, 3, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("issue", ["24084", "2083"])
def test_issue_delayed_registration_never_meets_a_stale_hash(issue):
    """Blocks that held another request's hashes are registered anew under their own; with
    caching off nothing ever is."""
    manager = make_manager(5)
    old = make_request("old", range(17))
    admit(manager, old)
    manager.free(old)
    new = make_request("new", [9] * 13)
    manager.allocate_slots(new, 13, delay_cache_blocks=True)
    manager.register_full_blocks(new, 12)
    assert num_hits(manager, make_request("again", [9] * 13)) == 12
    off = make_manager(5, enable_caching=False)
    off.allocate_slots(new, 13)
    off.register_full_blocks(new, 12)
    assert off.pool.num_cached_keys == 0


@pytest.mark.parametrize("issue", ["33775"])
def test_issue_no_group_takes_another_ones_hits(issue):
    """The first free block is a hit of the second group, and the first group needs a block for
    external tokens: all hits are pinned before that one is taken."""
    specs = (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8))
    manager = make_manager(9, specs)
    for name, tokens in (("old", range(8)), ("later", [9] * 8)):
        request = make_request(name, tokens)
        admit(manager, request)
        manager.free(request)
    assert free_order(manager) == [2, 1, 4, 3, 6, 5, 8, 7]
    new = make_request("new", range(17))
    hits, num_local = manager.get_computed_blocks(new)
    assert hits == ([1, 2], [3, 4])
    manager.allocate_slots(new, 1, num_local, hits, num_external_computed_tokens=4)
    assert manager.get_block_ids("new") == ([1, 2, 3, 5], [0, 4, 6, 8])


def test_allocating_nothing_is_an_error():
    """Neither new nor external tokens."""
    manager = make_manager()
    with pytest.raises(ValueError, match=r"request 'r': num_new_tokens must be > 0"):
        manager.allocate_slots(make_request("r", range(4)), 0)


def test_hits_for_a_request_that_holds_blocks_are_an_error():
    """Hits come with the first allocation only; the table stays as it is."""
    manager = make_manager()
    request = make_request("r", range(9))
    admit(manager, request)
    before = snapshot(manager)
    with pytest.raises(ValueError, match=r"request 'r' holds blocks already"):
        manager.allocate_slots(request, 1, 4, ([1],))
    assert snapshot(manager) == before


@pytest.mark.parametrize("watermark", [-0.1, 1.0])
def test_bad_watermarks_are_refused(watermark):
    """The share is in [0, 1)."""
    with pytest.raises(ValueError, match=rf"watermark must be in \[0, 1\), got {watermark}"):
        make_manager(watermark=watermark)


@pytest.mark.parametrize(
    "ask",
    [
        lambda manager: manager.get_num_common_prefix_blocks("nobody"),
        lambda manager: manager.get_block_ids("nobody"),
        lambda manager: manager.free(make_request("nobody", range(4))),
        lambda manager: manager.pop_blocks(make_request("nobody", range(4))),
        lambda manager: manager.drop_unwritten_hashes(make_request("nobody", range(4))),
    ],
)
def test_asking_about_unknown_requests_changes_nothing(ask):
    """X8: neither the tables nor what is answered about others afterwards."""
    manager = make_manager()
    admit(manager, make_request("r", range(10)))
    before = snapshot(manager)
    ask(manager)
    assert snapshot(manager) == before
    assert manager.get_num_common_prefix_blocks("r") == [3]
    assert manager.get_num_common_prefix_blocks("nobody") == [0]


def test_common_prefix_counts_blocks_that_all_share():
    """A lone request of 10 tokens shares all 3 blocks with itself; two share their hits."""
    manager = make_manager()
    admit(manager, make_request("a", range(10)))
    assert manager.get_num_common_prefix_blocks("a") == [3]
    admit(manager, make_request("b", [*range(8), 50, 51]))
    assert manager.get_num_common_prefix_blocks("a") == [2]
    admit(manager, make_request("c", [50] * 6))
    assert manager.get_num_common_prefix_blocks("a") == [0]


def test_popped_blocks_stay_in_use_until_they_are_freed():
    """A request can be forgotten before its blocks may be handed out; the order is that of
    `free`."""
    manager, other = make_manager(10), make_manager(10)
    for each in (manager, other):
        admit(each, make_request("r", range(13)))
    request = make_request("r", range(13))
    blocks = manager.pop_blocks(request)
    assert free_order(manager) == [5, 6, 7, 8, 9]
    assert manager.get_block_ids("r") == ([],)
    manager.pool.free(blocks)
    other.free(request)
    assert free_order(manager) == free_order(other)
