"""One-pass hashing gives the hashes of one call per block (spec kv 1.1)."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotmirror.kvcache.block_hashing import (
    RequestBlockHasher,
    group_key,
    hash_block_tokens,
    rescale_block_hashes,
)
from slotmirror.kvcache.hash_chain import get_hash_chain
from slotmirror.kvcache.hash_functions import HASH_FUNCTIONS
from slotmirror.kvcache.request import Request
from support.kv_builders import make_hasher, make_request

TOKENS = st.one_of(
    st.integers(0, 300), st.integers(60_000, 70_000), st.integers(2**31 - 3, 2**31 + 3)
)


def one_call_per_block(function, parent, tokens, size):
    hashes = []
    for start in range(0, len(tokens), size):
        parent = hash_block_tokens(function, parent, tokens[start : start + size])
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
@given(data=st.data(), size=st.sampled_from([1, 2, 3, 4, 5, 16, 24, 256]))
@settings(max_examples=30, deadline=None)
def test_equals_one_call_per_block(algo, data, size):
    """For every algorithm, block size, width of integers and length of the parent's hash."""
    function = HASH_FUNCTIONS[algo]
    tokens = data.draw(st.lists(TOKENS, min_size=size, max_size=3 * size))
    tokens = tokens[: len(tokens) // size * size]
    parent = data.draw(st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32))
    expected = one_call_per_block(function, parent, tokens, size)
    assert get_hash_chain(function)(parent, tokens, size) == expected


@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
def test_block_larger_than_a_pickle_frame(algo):
    """Pickle splits payloads over 64 KiB into frames; the one-pass form agrees there too."""
    tokens = [(i * 7919 + 3) % 151_936 for i in range(2 * 16_384)]
    function, parent = HASH_FUNCTIONS[algo], b"p" * 32
    expected = one_call_per_block(function, parent, tokens, 16_384)
    assert get_hash_chain(function)(parent, tokens, 16_384) == expected


def test_any_callable_is_a_hash_function():
    """A caller's own function is called once per block, with (parent, tokens, None)."""
    chain = get_hash_chain(pickle.dumps)
    first = pickle.dumps((b"p", (1, 2), None))
    assert chain(b"p", [1, 2, 3, 4], 2) == [first, pickle.dumps((first, (3, 4), None))]


@pytest.mark.parametrize("algo", HASH_FUNCTIONS)
@pytest.mark.parametrize("size", [1, 16, 24, 300])
def test_long_prompts_with_every_width_of_integer(algo, size):
    """Tokens at all limits of the CBOR widths, in prompts that are encoded at once."""
    limits = [0, 23, 24, 255, 256, 65_535, 65_536, 151_935, 2**31, 2**32 - 1]
    tokens = [limits[(i * i + i // 7) % len(limits)] for i in range(4 * 600)]
    tokens = tokens[: len(tokens) // size * size]
    function, parent = HASH_FUNCTIONS[algo], b"p" * 32
    expected = one_call_per_block(function, parent, tokens, size)
    assert get_hash_chain(function)(parent, tokens, size) == expected


@pytest.mark.parametrize("outlier", [2**32, 2**64, -1])
def test_integers_that_are_no_tokens_hash_as_one_call_per_block(outlier):
    """Beyond four bytes, or negative: the value decides, not the way of computing it."""
    tokens = [*range(1000), outlier, *range(23)]
    function = HASH_FUNCTIONS["sha256_cbor"]
    expected = one_call_per_block(function, b"p" * 32, tokens, 16)
    assert get_hash_chain(function)(b"p" * 32, tokens, 16) == expected


def test_hashing_is_incremental_and_covers_full_blocks_only():
    """Hashes appear when a block is complete, however the tokens arrive."""
    request = make_request("a", range(6))
    assert len(request.block_hashes) == 1
    request.append_output_token_ids(6)
    assert len(request.block_hashes) == 1
    request.append_output_token_ids([7, 8, 9, 10, 11])
    assert request.block_hashes == make_request("b", range(12)).block_hashes


def test_without_hasher_the_list_stays_empty():
    """Prefix caching off: nothing is hashed, also after appending."""
    request = Request("a", range(8))
    request.append_output_token_ids([1] * 8)
    assert request.block_hashes == []


def test_token_arrays_hash_like_lists():
    """Integers of an array library become plain ones, which pickle writes differently."""
    numpy = pytest.importorskip("numpy")
    tokens = numpy.arange(8, dtype=numpy.int64)
    assert Request("a", tokens, block_hasher=make_hasher()).block_hashes == (
        make_request("b", range(8)).block_hashes
    )


def test_a_block_hash_stands_for_its_whole_prefix():
    """Equal tokens after different ones hash differently: the chain excludes infix matches."""
    first, second = make_request("a", range(8)), make_request("b", [9, 1, 2, 3, 4, 5, 6, 7])
    assert first.block_hashes[1] != second.block_hashes[1]


def test_rescaled_hashes_are_those_of_the_last_small_block():
    """Blocks twice as large use every second hash; equal sizes use the list as it is."""
    hashes = [bytes([i]) for i in range(5)]
    assert rescale_block_hashes(hashes, 4, 8) == [hashes[1], hashes[3]]
    assert rescale_block_hashes(hashes, 4, 4) is hashes


def test_group_key_is_hash_and_big_endian_group():
    """A hash within a group is its bytes and the group's number in 4 bytes, big-endian."""
    assert group_key(b"\xab", 258) == b"\xab\x00\x00\x01\x02"


def test_one_hasher_serves_interleaved_requests():
    """The hasher keeps no state between calls: two requests may grow in turn."""
    hasher: RequestBlockHasher = make_hasher()
    first = Request("a", range(4), block_hasher=hasher)
    second = Request("b", range(4), block_hasher=hasher)
    first.append_output_token_ids([4, 5, 6, 7])
    second.append_output_token_ids([4, 5, 6, 7])
    assert first.block_hashes == second.block_hashes
