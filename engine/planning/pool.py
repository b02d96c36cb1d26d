"""The same trace against a pool of fixed size that evicts as the engine's does."""

from collections.abc import Sequence

from slotmirror.core.errors import ConfigError
from slotmirror.engine.planning.requests import PlannedRequest
from slotmirror.kvcache.block_pool import BlockPool
from slotmirror.kvcache.hash_functions import BlockHash

_GROUP = 0


class PlannedPool:
    """Serves requests one after another from the engine's own block pool.

    Each request takes blocks for its prompt and for what it generates, all but the last token,
    which is never computed on; its blocks go back tail first when it ends. Requests that run at
    the same time are not modelled: they would hold some of the pool back from eviction.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ConfigError("num_blocks", num_blocks, "must be at least 2: block 0 is never used")
        self.num_blocks = num_blocks
        self.hit_tokens = 0
        self.requests_too_long = 0
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._blocks_registered = 0

    @property
    def evictions(self) -> int:
        """Blocks whose content was dropped for other content."""
        return self._blocks_registered - len(self._pool.cached_of(range(self.num_blocks)))

    def serve(self, request: PlannedRequest) -> None:
        """Run one request from admission to its end; one that can never fit is only counted."""
        computed_tokens = request.num_tokens + request.output_tokens - 1
        num_blocks = -(-computed_tokens // self._block_size)
        if num_blocks > self.num_blocks - 1:
            self.requests_too_long += 1
            return
        reusable = (request.num_tokens - 1) // self._block_size
        (hits,) = self._pool.find_longest_run(request.block_hashes, reusable, (_GROUP,))
        self._pool.touch(hits)
        taken = self._pool.take(num_blocks - len(hits))
        hashes = self._computed_hashes(request, computed_tokens)[len(hits) :]
        self._pool.register(taken[: len(hashes)], hashes, _GROUP)
        self._blocks_registered += len(hashes)
        self._pool.free((hits + taken)[::-1])
        self.hit_tokens += len(hits) * self._block_size

    def _computed_hashes(
        self, request: PlannedRequest, computed_tokens: int
    ) -> Sequence[BlockHash]:
        """Hashes of all whole blocks; those with generated tokens are nobody else's."""
        prompt_blocks = len(request.block_hashes)
        generated = range(prompt_blocks, computed_tokens // self._block_size)
        own = (BlockHash(f"{request.request_id}/{i}".encode()) for i in generated)
        return (*request.block_hashes, *own)
