"""Blocks, their reference counts and the map from hash to block (spec kv 3).

Owned by the engine thread; nothing here locks. A block is its id: state lies in flat lists
indexed by it, so no object exists per block. The null block, 0, is never free and never cached.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import compress, islice

from slotmirror.kvcache.events import KVEventLog
from slotmirror.kvcache.free_queue import FreeBlockQueue
from slotmirror.kvcache.hash_functions import BlockHash

_log = logging.getLogger(__name__)

BlockIds = tuple[list[int], ...]
"""Block ids per KV-cache group."""


class PoolObserver:
    """Told what happens to blocks; every method does nothing by default."""

    def on_taken(self, block_ids: Sequence[int]) -> None:
        """These free blocks were handed out; what they held is gone."""

    def on_touched(self, block_ids: Sequence[int]) -> None:
        """These cached blocks got one more user."""

    def on_hash_dropped(self, block_id: int, block_hash: BlockHash, group_id: int) -> None:
        """This block left the map: reused, evicted or never written."""

    def on_evicted(self, block_ids: Sequence[int]) -> None:
        """Somebody asked to drop the hashes of these blocks."""

    def on_reset(self) -> None:
        """Every hash was dropped."""


class BlockPool:
    """Hands out blocks, takes them back, and finds them by content.

    Eviction is lazy: a freed block keeps its hash, and can be hit, until it is handed out again.
    Equal content is not deduplicated, because a request's table must not change under it: one
    hash may name several blocks, and a lookup returns the one registered first.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        events: KVEventLog | None = None,
        observer: PoolObserver | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_hashes: list[BlockHash | None] = [None] * num_blocks
        self.free_queue = FreeBlockQueue(num_blocks)
        self.ref_counts = self.free_queue.ref_counts
        self._group_ids = [0] * num_blocks
        self._first_block: list[dict[BlockHash, int]] = [{} for _ in range(num_groups)]
        self._copies: list[dict[BlockHash, dict[int, None]]] = [{} for _ in range(num_groups)]
        self._events = events
        self._observer = observer

    @property
    def num_free_blocks(self) -> int:
        return self.free_queue.num_free

    @property
    def num_cached_keys(self) -> int:
        """Distinct (hash, group) pairs that a lookup can find."""
        return sum(map(len, self._first_block))

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0.0 to 1.0, the null block not counted."""
        total = self.num_blocks - 1
        return 1.0 - self.num_free_blocks / total if total else 0.0

    def find(self, block_hash: BlockHash, group_ids: Sequence[int]) -> list[int] | None:
        """The block with this hash in each of the groups, None if any of them misses."""
        blocks = []
        for group_id in group_ids:
            block = self._first_block[group_id].get(block_hash)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def find_longest_run(
        self, block_hashes: Sequence[BlockHash], max_blocks: int, group_ids: Sequence[int]
    ) -> BlockIds:
        """Per group, the blocks of the leading hashes that hit in all groups; at most `max_blocks`.

        A chain's hash covers its whole prefix, so nothing after the first miss can hit.
        """
        if not block_hashes or block_hashes[0] not in self._first_block[group_ids[0]]:
            return tuple([[] for _ in group_ids])
        runs: list[list[int]] = []
        for group_id in group_ids:
            get = self._first_block[group_id].get
            run: list[int] = []
            for block_hash in islice(block_hashes, max_blocks):
                block = get(block_hash)
                if block is None:
                    break
                run.append(block)
            runs.append(run)
            max_blocks = len(run)
        for run in runs:
            del run[max_blocks:]
        return tuple(runs)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks from the front of the queue, dropping what they cached.

        Raises ValueError, changing nothing, if fewer are free.
        """
        blocks = self.free_queue.take(count)
        hashes = self.block_hashes
        for block in blocks:
            if hashes[block] is not None:
                self._drop_hash(block)
        if self._observer is not None:
            self._observer.on_taken(blocks)
        return blocks

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a user to each block; free ones leave the queue and cannot be evicted any more."""
        self.free_queue.share(block_ids)
        if self._observer is not None:
            self._observer.on_touched(block_ids)

    def count_free(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are in the free queue."""
        return list(map(self.ref_counts.__getitem__, block_ids)).count(0)

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one user off each block, given in the order in which they should be evicted."""
        self.free_queue.release(block_ids, self.block_hashes)

    def register(
        self, block_ids: Sequence[int], block_hashes: Sequence[BlockHash], group_id: int
    ) -> None:
        """Make these full blocks findable by their hashes, paired by position."""
        own_hashes, own_groups = self.block_hashes, self._group_ids
        first_block = self._first_block[group_id]
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            if own_hashes[block] is not None:
                raise RuntimeError(f"block {block} is registered twice: a bug in the KV cache")
            own_hashes[block] = block_hash
            own_groups[block] = group_id
            first = first_block.setdefault(block_hash, block)
            if first != block:
                self._copies[group_id].setdefault(block_hash, {first: None})[block] = None

    def evict(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes of these blocks; users and queue stay as they are.

        Raises ValueError, changing nothing, for an id outside the pool.
        """
        blocks = list(block_ids)
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"cannot evict block {block}: the pool has {self.num_blocks}")
        for block in blocks:
            if self.block_hashes[block] is not None:
                self._drop_hash(block)
        if self._observer is not None:
            self._observer.on_evicted(blocks)

    def reset(self) -> bool:
        """Drop every hash, keeping the queue's order; False and no change if blocks are in use."""
        num_used = self.num_blocks - 1 - self.num_free_blocks
        if num_used:
            _log.warning("prefix cache not reset: %d blocks are in use", num_used)
            return False
        for first_block in self._first_block:
            first_block.clear()
        for copies in self._copies:
            copies.clear()
        self.block_hashes = [None] * self.num_blocks
        if self._observer is not None:
            self._observer.on_reset()
        if self._events is not None:
            self._events.cleared()
        return True

    def cached_of(self, block_ids: Sequence[int]) -> list[int]:
        """Those of these blocks that have a hash."""
        hashes = self.block_hashes
        return list(compress(block_ids, (hashes[block] is not None for block in block_ids)))

    def _drop_hash(self, block: int) -> None:
        block_hash = self.block_hashes[block]
        assert block_hash is not None
        group_id = self._group_ids[block]
        self.block_hashes[block] = None
        copies = self._copies[group_id].get(block_hash)
        if copies is None:
            del self._first_block[group_id][block_hash]
        else:
            del copies[block]
            self._first_block[group_id][block_hash] = next(iter(copies))
            if len(copies) == 1:
                del self._copies[group_id][block_hash]
        if self._observer is not None:
            self._observer.on_hash_dropped(block, block_hash, group_id)
        if self._events is not None:
            self._events.removed(block_hash, group_id)
