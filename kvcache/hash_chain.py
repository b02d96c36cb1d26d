"""Hashes of many plain blocks in one pass: the values of `hash_block_tokens`, block by block.

Of what a block's hash costs, the digest is the smaller part and the calls around it the larger,
so each algorithm has its own loop. CBOR writes the tokens of a block one after the other, whatever
comes before them: those of all blocks are encoded at once, and only the chain goes block by block.
"""

import hashlib
import pickle
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import cbor2
import numpy as np

from slotmirror.kvcache.hash_functions import (
    BlockHash,
    HashFunction,
    load_xxh3_128_digest,
    sha256,
    sha256_cbor,
    xxhash,
    xxhash_cbor,
)

HashChain = Callable[[BlockHash, Sequence[int], int], list[BlockHash]]
"""(parent's hash, tokens of whole blocks, block size) to one hash per block; no extra keys."""

_PLACES = np.arange(5, dtype=np.uint8)
_MIN_TOKENS_AT_ONCE = 512
"""Below this, encoding all tokens at once costs more than it saves."""


def get_hash_chain(hash_function: HashFunction) -> HashChain:
    """The one-pass form of a hash function; any callable has one."""
    return _CHAINS.get(hash_function, partial(_call_each, hash_function))


def _call_each(
    hash_function: HashFunction, parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    hashes = []
    for block in zip(*[iter(tokens)] * block_size, strict=True):
        parent = hash_function((parent, block, None))
        hashes.append(parent)
    return hashes


def _sha256_chain(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    hashes = []
    dumps, new_digest = pickle.dumps, hashlib.sha256
    for block in zip(*[iter(tokens)] * block_size, strict=True):
        parent = new_digest(dumps((parent, block, None), 5)).digest()
        hashes.append(parent)
    return hashes


def _xxhash_chain(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
    hashes = []
    dumps, digest = pickle.dumps, load_xxh3_128_digest()
    for block in zip(*[iter(tokens)] * block_size, strict=True):
        parent = digest(dumps((parent, block, None), 5))
        hashes.append(parent)
    return hashes


def _cbor_chain(
    hash_function: HashFunction,
    digest: Callable[[bytes], BlockHash],
    parent: BlockHash,
    tokens: Sequence[int],
    block_size: int,
) -> list[BlockHash]:
    """Each block is an array of three: the parent's bytes, the array of tokens, null."""
    try:
        if len(tokens) < _MIN_TOKENS_AT_ONCE:
            return _call_each(hash_function, parent, tokens, block_size)
        blocks = _encode_token_arrays(array("I", tokens), block_size)
    except OverflowError:
        # Longer than the four bytes that `_encode_token_arrays` knows.
        return _call_each(hash_function, parent, tokens, block_size)
    hashes = []
    no_hash = digest(b"")
    head = b"\x83" + cbor2.dumps(no_hash)[: -len(no_hash)]
    before = b"\x83" + cbor2.dumps(parent)
    for block in blocks:
        block_hash = digest(before + block)
        hashes.append(block_hash)
        before = head + block_hash
    return hashes


def _encode_token_arrays(tokens: "array[int]", block_size: int) -> list[bytes]:
    """CBOR of each block's array of tokens, with the null behind it.

    An integer is its last byte below 24, else a head that says how many bytes follow (1, 2 or 4)
    and these, the highest first. So each token has a row of five bytes, of which it uses the end.
    """
    values = np.frombuffer(tokens, dtype=np.uint32)
    width = np.ones(len(values), dtype=np.uint8)
    for limit, more_bytes in ((23, 1), (0xFF, 1), (0xFFFF, 2)):
        width[values > limit] += np.uint8(more_bytes)
    rows = np.empty((len(values), 5), dtype=np.uint8)
    rows[:, 0] = 0x1A
    rows[:, 1:] = values.astype(">u4").view(np.uint8).reshape(-1, 4)
    rows[width == 3, 2] = 0x19
    rows[width == 2, 3] = 0x18
    encoded = rows[5 - width[:, None] <= _PLACES].tobytes()
    head = cbor2.dumps([0] * block_size)[:-block_size]
    ends = np.cumsum(width.reshape(-1, block_size).sum(axis=1)).tolist()
    return [head + encoded[start:end] + b"\xf6" for start, end in pairwise([0, *ends])]


def _sha256_cbor_chain(
    parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    def digest(data: bytes) -> BlockHash:
        return hashlib.sha256(data).digest()

    return _cbor_chain(sha256_cbor, digest, parent, tokens, block_size)


def _xxhash_cbor_chain(
    parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    return _cbor_chain(xxhash_cbor, load_xxh3_128_digest(), parent, tokens, block_size)


_CHAINS: dict[HashFunction, HashChain] = {
    sha256: _sha256_chain,
    sha256_cbor: _sha256_cbor_chain,
    xxhash: _xxhash_chain,
    xxhash_cbor: _xxhash_cbor_chain,
}
