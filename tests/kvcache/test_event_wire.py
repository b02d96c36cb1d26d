"""KV events as bytes: exact, reversible, and clear about what is missing."""

import sys

import msgspec
import pytest

from slotmirror.kvcache.event_stream.wire import KVEventBatch, decode_batch, encode_batch
from slotmirror.kvcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventLog,
)
from slotmirror.kvcache.hash_functions import KeyFormat, init_start_value, sha256
from slotmirror.kvcache.request import MultimodalFeature
from support.kv_builders import admit, make_manager, make_request

STORED = BlockStored(
    block_hashes=[2**64 - 1, b"\x00\x01"],
    parent_block_hash=None,
    token_ids=[1, 70_000],
    block_size=1,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    extra_keys=[None, (("mm", "image", -3), b"\xff")],
    group_idx=0,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=8,
)


def test_a_batch_is_an_array_and_an_event_a_map():
    """Required fields are written though they are None, optional ones are left out then."""
    batch = KVEventBatch(1.5, [BlockRemoved([7], None), AllBlocksCleared()], 3)
    assert msgspec.msgpack.decode(encode_batch(batch)) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [7], "medium": None},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_fields_keep_their_order():
    """Consumers compare bytes: type first, then the fields as they are declared."""
    (event,) = msgspec.msgpack.decode(encode_batch(KVEventBatch(0.0, [STORED])))[1]
    assert list(event) == ["type", *BlockStored.__dataclass_fields__]


def test_decoding_restores_the_batch():
    """Also integers of 64 bits, raw hashes, and tuples, which hashes tell from lists."""
    batch = KVEventBatch(1.5, [STORED, BlockRemoved([b"x"], "GPU", 1), AllBlocksCleared()], None)
    assert decode_batch(encode_batch(batch)) == batch


def test_fields_of_newer_publishers_are_ignored():
    """A field that this version does not know changes nothing."""
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "locality": "LOCAL"}
    batch = decode_batch(msgspec.msgpack.encode([0.5, [event], 0]))
    assert batch.events == [BlockRemoved([1], "GPU")]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"ts": 1}), "Expected `array`"),
        (msgspec.msgpack.encode([1.0, [{"type": "Stored"}], 0]), "not 'Stored'"),
        (msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}], 0]), "block_hashes"),
    ],
)
def test_other_bytes_are_refused(payload, message):
    """A ValueError says what is wrong with them."""
    with pytest.raises(ValueError, match=message):
        decode_batch(payload)


@pytest.mark.parametrize("issue", ["33304", "2384", "165"])
def test_issue_hashes_are_rebuilt_from_the_bytes(issue):
    """Tokens, parent and extra keys survive the wire, so a consumer's hashes are the engine's."""
    manager = make_manager(40, events=KVEventLog(use_int_block_hashes=False))
    features = [MultimodalFeature("one", 2, 5), MultimodalFeature("two", 9, 2)]
    request = make_request("r", range(12), mm_features=features, cache_salt="s")
    admit(manager, request)
    (event,) = decode_batch(encode_batch(KVEventBatch(0.0, manager.take_events()))).events
    parent = init_start_value("sha256", KeyFormat.TAGGED, {"PYTHONHASHSEED": "0"})
    rebuilt = []
    for i, keys in enumerate(event.extra_keys):
        parent = sha256((parent, tuple(event.token_ids[i * 4 : (i + 1) * 4]), keys))
        rebuilt.append(parent)
    assert rebuilt == event.block_hashes == request.block_hashes


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    """Without msgspec the error says what to install."""
    monkeypatch.setitem(sys.modules, "msgspec.msgpack", None)
    with pytest.raises(ModuleNotFoundError, match=r"need msgspec: .*'slotmirror\[events\]'"):
        encode_batch(KVEventBatch(0.0, []))
