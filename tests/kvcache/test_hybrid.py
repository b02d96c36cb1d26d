"""Several kinds of attention over one pool (spec kv 5)."""

import pytest

from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    resolve_block_sizes,
)
from support.kv_builders import admit, make_hasher, make_manager, make_request

FULL, WINDOW = FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8)


def cached(manager, num_tokens=17, hash_block_size=4):
    old = make_request("old", range(num_tokens), block_hasher=make_hasher(hash_block_size))
    admit(manager, old)
    manager.free(old)
    return manager


def lookup(manager, num_tokens=17, hash_block_size=4):
    request = make_request("new", range(num_tokens), block_hasher=make_hasher(hash_block_size))
    return manager.get_computed_blocks(request)


def test_a_hit_suits_all_kinds():
    """Full attention needs every block, the window its last two."""
    manager = cached(make_manager(30, (FULL, WINDOW)))
    blocks, length = lookup(manager)
    assert length == 16
    assert blocks == ([1, 2, 3, 4], [0, 0, 8, 9])


def test_a_miss_in_the_window_shortens_all():
    """The window's last block is gone: full attention is cut to what is left."""
    manager = cached(make_manager(30, (FULL, WINDOW)))
    manager.evict_blocks({9})
    assert lookup(manager) == (([1, 2, 3], [0, 7, 8]), 12)


def test_a_miss_in_full_attention_shortens_all():
    """The second full block is gone: only the first can hit, in the window too."""
    manager = cached(make_manager(30, (FULL, WINDOW)))
    manager.evict_blocks({2})
    assert lookup(manager) == (([1], [6]), 4)


def test_groups_of_one_spec_must_all_hit():
    """Two windows with equal specs are looked up together."""
    manager = cached(make_manager(40, (WINDOW, FULL, WINDOW)))
    blocks, length = lookup(manager)
    assert length == 16
    manager.evict_blocks({blocks[2][-1]})
    assert lookup(manager)[1] == 12


def test_mixed_block_sizes_hit_at_common_multiples():
    """Blocks of 8 and 4: hits are multiples of 8, hashes of 4 serve both."""
    manager = make_manager(30, (FullAttentionSpec(8), WINDOW))
    assert (manager.min_hit_tokens, manager.hash_block_size) == (8, 4)
    cached(manager, 23)
    blocks, length = lookup(manager, 23)
    assert length == 16
    assert [len(table) for table in blocks] == [2, 4]


def test_only_blocks_below_an_aligned_length_are_registered():
    """23 tokens: 16 are aligned to 8, so the window's block of tokens 16-19 stays unknown; so
    do blocks that no aligned window can need."""
    manager = make_manager(30, (FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=4)))
    request = make_request("r", range(23))
    admit(manager, request)
    hashed = [
        [manager.pool.block_hashes[block] is not None for block in table]
        for table in manager.get_block_ids("r")
    ]
    assert hashed == [[True, True, False], [False, True, False, True, False, False]]


@pytest.mark.parametrize("issue", ["40624", "32802"])
def test_issue_the_draft_heads_drop_is_applied_once(issue):
    """EAGLE over full attention and two windows: one block less, not ground down to nothing."""
    specs = (FULL, WINDOW, SlidingWindowSpec(4, sliding_window=12))
    manager = cached(make_manager(60, specs, use_eagle=True), 33)
    blocks, length = lookup(manager, 33)
    assert length == 28
    assert {len(table) for table in blocks} == {7}


def test_only_flagged_groups_drop():
    """The drop concerns groups that a draft head reads."""
    groups = (KVCacheGroupSpec(FULL), KVCacheGroupSpec(WINDOW, is_eagle_group=True))
    manager = KVCacheManager(KVCacheConfig(60, groups), 1024, use_eagle=True)
    assert [each.use_eagle for each in manager.coordinator.managers] == [False, True]
    assert lookup(cached(manager, 33), 33)[1] == 28


def test_several_groups_need_two_specs():
    """Groups with one spec belong into one group; the error says so."""
    with pytest.raises(ValueError, match="at least two distinct specs"):
        make_manager(30, (FULL, FULL))


def test_caching_off_takes_any_groups():
    """Equal specs are fine without prefix caching."""
    manager = make_manager(30, (FULL, FULL), enable_caching=False)
    admit(manager, make_request("r", range(9)))
    assert manager.get_block_ids("r") == ([1, 2, 3], [4, 5, 6])


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ((16,), {}, (16, 16)),
        ((16,), {"hash_block_size": 4}, (16, 16)),
        ((8, 12), {}, (24, 4)),
        ((8, 12), {"hash_block_size": 2}, (24, 2)),
        ((8, 12), {"enable_caching": False}, (24, 24)),
    ],
)
def test_block_sizes(sizes, options, expected):
    """Hits: least common multiple. Hashes: greatest common divisor, unless given or unused."""
    groups = [KVCacheGroupSpec(FullAttentionSpec(size)) for size in sizes]
    assert resolve_block_sizes(groups, **options) == expected


def test_bad_hash_block_size_is_refused():
    """It must divide every group's block size."""
    groups = [KVCacheGroupSpec(FullAttentionSpec(size)) for size in (8, 12)]
    with pytest.raises(ValueError, match=r"hash_block_size=8 must divide.*\[8, 12\]"):
        resolve_block_sizes(groups, hash_block_size=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0), "block_size must be >= 1, got 0"),
        (lambda: SlidingWindowSpec(4, sliding_window=0), "sliding_window must be >= 1, got 0"),
        (lambda: KVCacheConfig(1, ()), "num_blocks must be >= 2"),
    ],
)
def test_bad_specs_are_refused(make, message):
    """Specs check themselves and name the setting."""
    with pytest.raises(ValueError, match=message):
        make()
