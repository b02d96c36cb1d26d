"""Chained hashes of full blocks (seed 2, hash_block_tokens; spec kv 1.1, 1.4).

The hash of a block covers its parent's hash, its tokens and its extra keys, so it stands for the
whole prefix that ends with the block.
"""

from collections.abc import Sequence

from slotmirror.kvcache.extra_keys import (
    ExtraKeys,
    generate_block_hash_extra_keys,
    needs_extra_keys,
    resume_feature_index,
)
from slotmirror.kvcache.hash_chain import get_hash_chain
from slotmirror.kvcache.hash_functions import (
    BlockHash,
    HashFunction,
    KeyFormat,
    get_hash_function,
    init_start_value,
)
from slotmirror.kvcache.request import BlockHasher, Request


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHash,
    token_ids: Sequence[int],
    extra_keys: ExtraKeys = None,
) -> BlockHash:
    """Hash of one full block. `parent_block_hash` of a first block is the engine's start value."""
    return hash_function((parent_block_hash, tuple(token_ids), extra_keys))


class RequestBlockHasher:
    """From a request to the hashes of its full blocks that are not hashed yet.

    Stateless between calls; one instance serves all requests of an engine.
    """

    def __init__(
        self,
        hash_block_size: int,
        hash_function: HashFunction,
        start_value: BlockHash,
        key_format: KeyFormat = KeyFormat.TAGGED,
    ) -> None:
        self.hash_block_size = hash_block_size
        self._hash_function = hash_function
        self._hash_chain = get_hash_chain(hash_function)
        self._start_value = start_value
        self._key_format = key_format

    def __call__(self, request: Request) -> list[BlockHash]:
        size = self.hash_block_size
        start = len(request.block_hashes) * size
        end = request.num_tokens // size * size
        parent = request.block_hashes[-1] if request.block_hashes else self._start_value
        if not needs_extra_keys(request):
            return self._hash_chain(parent, request.all_token_ids[start:end], size)
        return self._hash_with_extra_keys(request, parent, range(start, end, size))

    def _hash_with_extra_keys(
        self, request: Request, parent: BlockHash, starts: range
    ) -> list[BlockHash]:
        first_feature = resume_feature_index(request, starts.start, self._key_format)
        hashes = []
        for start in starts:
            end = start + self.hash_block_size
            keys = generate_block_hash_extra_keys(
                request, start, end, self._key_format, first_feature
            )
            tokens = request.all_token_ids[start:end]
            parent = hash_block_tokens(self._hash_function, parent, tokens, keys)
            hashes.append(parent)
        return hashes


def get_request_block_hasher(
    hash_block_size: int,
    hash_function: HashFunction,
    start_value: BlockHash,
    key_format: KeyFormat = KeyFormat.TAGGED,
) -> BlockHasher:
    """The hasher of an engine whose hash function and start value are chosen already."""
    return RequestBlockHasher(hash_block_size, hash_function, start_value, key_format)


def make_block_hasher(
    hash_block_size: int,
    prefix_caching_hash_algo: str = "sha256",
    key_format: KeyFormat = KeyFormat.TAGGED,
) -> BlockHasher:
    """The hasher of an engine process: algorithm by name, start value from the environment."""
    function = get_hash_function(prefix_caching_hash_algo)
    start_value = init_start_value(prefix_caching_hash_algo, key_format)
    return get_request_block_hasher(hash_block_size, function, start_value, key_format)


def rescale_block_hashes(
    block_hashes: list[BlockHash], hash_block_size: int, block_size: int
) -> list[BlockHash]:
    """Hashes of blocks that are `block_size // hash_block_size` times larger: each is the hash of
    its last small block, which covers the whole prefix already; nothing is hashed again."""
    scale = block_size // hash_block_size
    return block_hashes if scale == 1 else block_hashes[scale - 1 :: scale]


def group_key(block_hash: BlockHash, group_id: int) -> bytes:
    """A block hash within a KV-cache group, as one byte string: hash, then the id big-endian."""
    return block_hash + group_id.to_bytes(4, "big")
