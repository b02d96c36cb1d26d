"""Blocks found by content, evicted lazily, never deduplicated (spec kv 3)."""

import logging

import pytest

from slotmirror.kvcache.block_pool import BlockPool

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_lookup_returns_the_first_surviving_copy():
    """Two blocks with one hash: the first is found, and after its eviction the second."""
    pool = BlockPool(8)
    blocks = pool.take(3)
    pool.register(blocks, [A, A, A], 0)
    assert pool.num_cached_keys == 1
    assert pool.find(A, [0]) == [1]
    pool.evict([1])
    assert pool.find(A, [0]) == [2]
    pool.evict([3])
    assert pool.find(A, [0]) == [2]
    pool.evict([2])
    assert pool.find(A, [0]) is None


def test_an_evicted_block_that_returns_is_last():
    """A copy that was evicted and registered again comes after the others."""
    pool = BlockPool(8)
    pool.register(pool.take(2), [A, A], 0)
    pool.evict([1])
    pool.register([1], [A], 0)
    assert pool.find(A, [0]) == [2]


def test_eviction_is_lazy():
    """A freed block keeps its hash until it is handed out again."""
    pool = BlockPool(3)
    pool.register(pool.take(1), [A], 0)
    pool.free([1])
    assert pool.find(A, [0]) == [1]
    assert pool.take(1) == [2]
    assert pool.find(A, [0]) == [1]
    assert pool.take(1) == [1]
    assert pool.find(A, [0]) is None


def test_a_hash_belongs_to_its_group():
    """The same hash in two groups names two blocks; a joint lookup needs both."""
    pool = BlockPool(8, num_groups=2)
    first, second = pool.take(2)
    pool.register([first], [A], 0)
    assert pool.find(A, [0, 1]) is None
    pool.register([second], [A], 1)
    assert pool.find(A, [0, 1]) == [first, second]
    assert pool.find_longest_run([A, B], 2, [0, 1]) == ([first], [second])


def test_longest_run_stops_at_the_first_miss_and_at_the_limit():
    """What lies after a miss cannot hit, and no group's run is longer than another's."""
    pool = BlockPool(8, num_groups=2)
    pool.register(pool.take(2), [A, C], 0)
    assert pool.find_longest_run([A, B, C], 3, [0]) == ([1],)
    pool.register(pool.take(1), [B], 0)
    assert pool.find_longest_run([A, B, C], 2, [0]) == ([1, 3],)
    pool.register(pool.take(1), [A], 1)
    assert pool.find_longest_run([A, B, C], 3, [0, 1]) == ([1], [4])


def test_touch_pins_and_counts():
    """A touched free block leaves the queue; a touched block in use gets another user."""
    pool = BlockPool(5)
    pool.register(pool.take(2), [A, B], 0)
    pool.free([2, 1])
    assert pool.count_free([1, 2]) == 2
    pool.touch([1])
    pool.touch([1])
    assert list(pool.free_queue) == [3, 4, 2]
    pool.free([1])
    assert pool.count_free([1, 2]) == 1


def test_evicting_a_block_in_use_drops_its_hash_only():
    """Users and queue stay as they are."""
    pool = BlockPool(4)
    pool.register(pool.take(1), [A], 0)
    pool.evict([1, 2])
    assert pool.find(A, [0]) is None
    assert pool.ref_counts[1] == 1
    assert list(pool.free_queue) == [2, 3]


@pytest.mark.parametrize("block", [-1, 4])
def test_evicting_a_foreign_block_changes_nothing(block):
    """An id outside the pool is named; the valid ids beside it are not evicted."""
    pool = BlockPool(4)
    pool.register(pool.take(1), [A], 0)
    with pytest.raises(ValueError, match=f"cannot evict block {block}: the pool has 4"):
        pool.evict([1, block])
    assert pool.find(A, [0]) == [1]


@pytest.mark.parametrize("issue", ["24084"])
def test_issue_a_block_with_a_stale_hash_is_never_registered(issue):
    """Registering a block that still has a hash is a bug and says so."""
    pool = BlockPool(4)
    pool.register(pool.take(1), [A], 0)
    with pytest.raises(RuntimeError, match="block 1 is registered twice"):
        pool.register([1], [B], 0)


def test_reset_needs_an_idle_pool(caplog):
    """False, a warning and no change while a block is in use; then every hash goes and the
    queue keeps its order."""
    pool = BlockPool(4)
    pool.register(pool.take(1), [A], 0)
    with caplog.at_level(logging.WARNING):
        assert not pool.reset()
    assert "1 blocks are in use" in caplog.text
    assert pool.find(A, [0]) == [1]
    pool.free([1])
    order = list(pool.free_queue)
    assert pool.reset()
    assert pool.find(A, [0]) is None
    assert list(pool.free_queue) == order == [2, 3, 1]


def test_usage_leaves_out_the_null_block():
    """Of 5 blocks 4 can be used."""
    pool = BlockPool(5)
    assert pool.usage == 0.0
    pool.take(1)
    assert pool.usage == 0.25
    pool.take(3)
    assert pool.usage == 1.0


def test_taking_too_many_changes_nothing():
    """The error says how many were asked for and how many are free."""
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(ValueError, match="cannot take 3 blocks: only 2 are free"):
        pool.take(3)
    assert list(pool.free_queue) == [2, 3]
