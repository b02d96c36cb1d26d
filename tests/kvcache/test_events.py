"""KV events: what a consumer is told, and what it can rebuild from it (spec kv 7)."""

import pytest

from slotmirror.kvcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventLog,
    external_block_hash,
)
from slotmirror.kvcache.hash_functions import KeyFormat, init_start_value, sha256
from slotmirror.kvcache.request import LoRARequest, MultimodalFeature
from slotmirror.kvcache.specs import FullAttentionSpec, SlidingWindowSpec
from support.kv_builders import admit, decode, make_manager, make_request


def logged(num_blocks=20, specs=(), **options):
    return make_manager(num_blocks, specs, events=KVEventLog(use_int_block_hashes=False), **options)


def test_one_event_per_registration():
    """A prompt's blocks come in one event; a decode step that completes a block in another, with
    the block before as parent."""
    manager = logged()
    request = make_request("r", range(11), lora_request=LoRARequest("L", "/l", adapter_id=3))
    admit(manager, request)
    decode(manager, request, [50])
    first, second = manager.take_events()
    keys = (("lora", "L", "/l"),)
    assert first == BlockStored(
        block_hashes=request.block_hashes[:2],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        lora_id=3,
        medium="GPU",
        lora_name="L",
        extra_keys=[keys, keys],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=None,
    )
    assert second.parent_block_hash == request.block_hashes[1]
    assert second.token_ids == [8, 9, 10, 50]
    assert manager.take_events() == []


def test_hits_are_silent_and_evictions_are_not():
    """A hit changes nothing; a reused block is removed; a reset clears."""
    manager = logged(6)
    first = make_request("a", range(9))
    admit(manager, first)
    manager.free(first)
    manager.take_events()
    again = make_request("b", range(9))
    admit(manager, again)
    assert manager.take_events() == []
    manager.free(again)
    other = make_request("c", [9] * 16)
    admit(manager, other)
    removed = BlockRemoved([first.block_hashes[1]], "GPU", 0)
    assert manager.take_events()[0] == removed
    manager.free(other)
    manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]


def test_removal_of_one_copy_is_reported_too():
    """Two blocks with one hash: consumers are told of each removal and must count."""
    manager = logged()
    for name in ("a", "b"):
        request = make_request(name, range(4))
        admit(manager, request)
    manager.evict_blocks({1, 2})
    kinds = [type(event).__name__ for event in manager.take_events()]
    assert kinds == ["BlockStored", "BlockStored", "BlockRemoved", "BlockRemoved"]


def test_sparse_groups_leave_hashes_out_but_not_tokens():
    """Blocks that no hit can reach have no hash in the event; the tokens are the whole range."""
    specs = (FullAttentionSpec(8), SlidingWindowSpec(4, sliding_window=4))
    manager = logged(30, specs)
    request = make_request("r", range(16))
    admit(manager, request)
    _, window = manager.take_events()
    assert window.block_hashes == [request.block_hashes[1], request.block_hashes[3]]
    assert window.token_ids == list(range(16))
    assert len(window.extra_keys) == 2
    assert window.kv_cache_spec_kind == "sliding_window"
    assert window.kv_cache_spec_sliding_window == 4


@pytest.mark.parametrize("issue", ["58119", "12002"])
def test_issue_the_parent_was_reported_before(issue):
    """Registration that starts behind hits names a parent that an earlier event stored."""
    manager = logged()
    old = make_request("old", range(13))
    admit(manager, old)
    manager.free(old)
    admit(manager, make_request("new", [*range(12), *[9] * 9]))
    first, second = manager.take_events()
    assert second.parent_block_hash in first.block_hashes


@pytest.mark.parametrize("issue", ["33304", "2384", "165"])
def test_issue_a_consumer_rebuilds_the_hashes(issue):
    """From tokens, parent and extra keys alone, with the engine's algorithm and start value."""
    manager = logged(40)
    features = [MultimodalFeature("one", 2, 5), MultimodalFeature("two", 9, 2)]
    request = make_request("r", range(11), mm_features=features, cache_salt="s")
    admit(manager, request, 6)
    manager.allocate_slots(request, 5)
    request.num_computed_tokens = 11
    for token in (50, 51, 52, 53, 54):
        decode(manager, request, [token])
    rebuilt = []
    for event in manager.take_events():
        parent = event.parent_block_hash or init_start_value(
            "sha256", KeyFormat.TAGGED, {"PYTHONHASHSEED": "0"}
        )
        for i, keys in enumerate(event.extra_keys):
            tokens = tuple(event.token_ids[i * 4 : (i + 1) * 4])
            parent = sha256((parent, tokens, keys))
            rebuilt.append(parent)
    assert rebuilt == request.block_hashes


def test_event_hash_is_the_last_8_bytes_as_integer():
    """Unsigned, big-endian; or the raw bytes."""
    block_hash = bytes(range(32))
    assert external_block_hash(block_hash, True) == int.from_bytes(bytes(range(24, 32)), "big")
    assert external_block_hash(block_hash, False) == block_hash


def test_integer_form_is_the_default():
    """All hashes of an event are integers then, the parent's too."""
    manager = make_manager(events=KVEventLog())
    request = make_request("r", range(4))
    admit(manager, request)
    decode(manager, request, [1, 2, 3, 4])
    for event in manager.take_events():
        assert all(isinstance(block_hash, int) for block_hash in event.block_hashes)
    assert event.parent_block_hash == external_block_hash(request.block_hashes[0], True)


def test_without_a_log_there_are_no_events():
    """Events are off by default and cost nothing."""
    manager = make_manager()
    admit(manager, make_request("r", range(8)))
    assert manager.take_events() == []
