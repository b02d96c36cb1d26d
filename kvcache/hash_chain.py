"""Hashes of many plain blocks in one pass: the values of `hash_block_tokens`, block by block.

Of what a block's hash costs, the digest is the smaller part and the calls around it the larger,
so each algorithm has its own loop. The CBOR loops put a block together from the encodings of its
tokens, which CBOR writes one after the other and which are the same in every block.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence

import cbor2

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

_MAX_KNOWN_TOKENS = 1 << 18


def get_hash_chain(hash_function: HashFunction) -> HashChain:
    """The one-pass form of a hash function; any callable has one."""

    def call_each(parent: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
        hashes = []
        for block in zip(*[iter(tokens)] * block_size, strict=True):
            parent = hash_function((parent, block, None))
            hashes.append(parent)
        return hashes

    return _CHAINS.get(hash_function, call_each)


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


class _TokenEncodings(dict[int, bytes]):
    """CBOR of every token seen; started anew when tokens come from no sensible vocabulary."""

    def __missing__(self, token: int) -> bytes:
        if len(self) >= _MAX_KNOWN_TOKENS:
            self.clear()
        encoding = self[token] = cbor2.dumps(token, canonical=True)
        return encoding


_encodings = _TokenEncodings()


def _cbor_chain(
    digest: Callable[[bytes], BlockHash],
    parent: BlockHash,
    tokens: Sequence[int],
    block_size: int,
) -> list[BlockHash]:
    """An array of three: the parent's bytes, the array of tokens, null."""
    hashes = []
    no_hash, no_tokens = digest(b""), bytes(block_size)
    hash_head = cbor2.dumps(no_hash)[: -len(no_hash)]
    tokens_head = cbor2.dumps(list(no_tokens))[:-block_size]
    join, parent_item = b"".join, cbor2.dumps(parent)
    for block in zip(*[map(_encodings.__getitem__, tokens)] * block_size, strict=True):
        block_hash = digest(b"\x83" + parent_item + tokens_head + join(block) + b"\xf6")
        hashes.append(block_hash)
        parent_item = hash_head + block_hash
    return hashes


def _sha256_cbor_chain(
    parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    def digest(data: bytes) -> BlockHash:
        return hashlib.sha256(data).digest()

    return _cbor_chain(digest, parent, tokens, block_size)


def _xxhash_cbor_chain(
    parent: BlockHash, tokens: Sequence[int], block_size: int
) -> list[BlockHash]:
    return _cbor_chain(load_xxh3_128_digest(), parent, tokens, block_size)


_CHAINS: dict[HashFunction, HashChain] = {
    sha256: _sha256_chain,
    sha256_cbor: _sha256_cbor_chain,
    xxhash: _xxhash_chain,
    xxhash_cbor: _xxhash_cbor_chain,
}
