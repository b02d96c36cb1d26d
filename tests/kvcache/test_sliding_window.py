"""Sliding windows: which blocks hit, are kept and are given back (spec kv 5)."""

import pytest

from slotmirror.kvcache.specs import SlidingWindowSpec
from support.kv_builders import admit, decode, free_order, make_manager, make_request


def windowed(window, num_blocks=20, **options):
    return make_manager(num_blocks, (SlidingWindowSpec(4, sliding_window=window),), **options)


def test_a_hit_needs_the_blocks_of_its_window_only():
    """Window 8: the two blocks before the end; earlier positions are the null block."""
    manager = windowed(8)
    old = make_request("old", range(17))
    admit(manager, old)
    manager.free(old)
    assert manager.get_computed_blocks(make_request("new", range(17))) == (([0, 0, 3, 4],), 16)


def test_a_hole_before_the_window_does_not_matter():
    """The first block is evicted, the hit is the same; one in the window shortens it."""
    manager = windowed(8)
    old = make_request("old", range(17))
    admit(manager, old)
    manager.free(old)
    manager.evict_blocks({1})
    assert manager.get_computed_blocks(make_request("new", range(17)))[1] == 16
    manager.evict_blocks({4})
    assert manager.get_computed_blocks(make_request("new", range(17))) == (([0, 2, 3],), 12)


def test_a_short_run_from_the_start_hits():
    """Window 12 needs three blocks, but one from the start is a whole prefix."""
    manager = windowed(12)
    old = make_request("old", range(5))
    admit(manager, old)
    manager.free(old)
    assert manager.get_computed_blocks(make_request("new", range(17))) == (([1],), 4)


def test_a_draft_head_gives_up_one_block():
    """With EAGLE one more block must hit, and the last is dropped."""
    manager = windowed(8, use_eagle=True)
    old = make_request("old", range(17))
    admit(manager, old)
    manager.free(old)
    assert manager.get_computed_blocks(make_request("new", range(17))) == (([0, 2, 3],), 12)


def test_blocks_behind_the_window_are_given_back_tail_first():
    """Window 8 after 16 computed tokens: positions 0-8 are out of sight, hence two blocks."""
    manager = windowed(8)
    request = make_request("r", range(16))
    admit(manager, request)
    decode(manager, request, [1])
    assert manager.get_block_ids("r") == ([0, 0, 3, 4, 5],)
    assert free_order(manager)[-2:] == [2, 1]


def test_they_are_given_back_also_when_the_allocation_fails():
    """A refused allocation may free blocks behind the window, and nothing else changes."""
    manager = windowed(8, num_blocks=6)
    request = make_request("r", range(16))
    admit(manager, request)
    assert manager.allocate_slots(request, 4 * 4) is None
    assert manager.get_block_ids("r") == ([0, 0, 3, 4],)


def test_common_prefix_is_zero():
    """The first blocks are null, so nothing is counted."""
    manager = windowed(8)
    admit(manager, make_request("r", range(16)))
    assert manager.get_num_common_prefix_blocks("r") == [0]


@pytest.mark.parametrize(("batched", "blocks"), [(4, 4), (16, 7), (1000, 100)])
def test_issue_39734_admission_counts_recycled_blocks_once(batched, blocks):
    """A prompt of 400 tokens never holds more than its window and one step's tokens."""
    manager = windowed(8, num_blocks=200, max_num_batched_tokens=batched)
    assert manager.max_blocks_held(400) == blocks


@pytest.mark.parametrize(
    ("interval", "kept"), [(None, [4, 8, 12, 16]), (8, [8, 12, 16]), (16, [12, 16]), (0, [12])]
)
def test_retention_interval_keeps_sparse_boundaries(interval, kept):
    """Window 4 needs one block per boundary: all of them, every n-th, or only the one where a
    repeat of this prompt hits."""
    manager = windowed(4, retention_interval=interval)
    request = make_request("r", range(16))
    admit(manager, request)
    registered = [
        (i + 1) * 4
        for i, block in enumerate(manager.get_block_ids("r")[0])
        if manager.pool.block_hashes[block] is not None
    ]
    assert registered == kept


@pytest.mark.parametrize("interval", [-4, 6])
def test_bad_retention_intervals_are_refused(interval):
    """The interval must end on boundaries where a hit can end."""
    with pytest.raises(ValueError, match=f"retention_interval={interval} must be a non-negative"):
        windowed(8, retention_interval=interval)


def test_retention_interval_without_windows_is_refused():
    """It would have no effect."""
    with pytest.raises(ValueError, match="retention_interval=8 needs a sliding-window group"):
        make_manager(retention_interval=8)
