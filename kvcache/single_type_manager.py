"""Block tables of one KV-cache group, and the rules of its kind of attention (spec kv 4, 5)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slotmirror.kvcache.block_hashing import rescale_block_hashes
from slotmirror.kvcache.block_pool import BlockIds, BlockPool
from slotmirror.kvcache.events import KVEventLog
from slotmirror.kvcache.free_queue import NULL_BLOCK_ID
from slotmirror.kvcache.hash_functions import BlockHash
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.specs import AttentionSpec


class SingleTypeKVCacheManager(ABC):
    """Tables of the requests that hold blocks in one group.

    Only requests that hold blocks have entries: asking about an unknown one changes nothing, and
    nothing grows with the number of requests served (public issues 44490, 28726).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        pool: BlockPool,
        group_id: int,
        *,
        hash_block_size: int,
        scheduler_block_size: int,
        use_eagle: bool = False,
        retention_interval: int | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.use_eagle = use_eagle
        self.tables: dict[str, list[int]] = {}
        self._num_registered: dict[str, int] = {}
        self._pool = pool
        self._group_id = group_id
        self._hash_block_size = hash_block_size
        self._scheduler_block_size = scheduler_block_size
        self._retention_interval = retention_interval
        self._events = events

    @abstractmethod
    def find_longest_cache_hit(
        self,
        block_hashes: list[BlockHash],
        max_length: int,
        group_ids: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> BlockIds:
        """Blocks of the longest prefix of at most `max_length` tokens that hits in all of
        `group_ids` (groups with this manager's spec), its length a multiple of
        `alignment_tokens`; positions nobody needs are the null block.

        `block_hashes` are at the hash block size. `drop_eagle_block` gives up the last block,
        whose hidden states a draft head must see. Touches nothing: the blocks may be free.
        """

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no later query can see once this many are computed."""
        return 0

    def num_common_prefix_blocks(self, request_id: str) -> int:
        """Leading blocks of the request that every request with blocks shares."""
        return 0

    def is_tracked(self, request_id: str) -> bool:
        """Whether the request has hits or registered blocks, so that no new hit can come."""
        return request_id in self._num_registered

    def max_blocks_held(self, num_tokens: int) -> int:
        """Most blocks that a request of this many tokens ever holds."""
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(
        self,
        request_id: str,
        num_tokens: int,
        hit_blocks: Sequence[int],
        total_computed_tokens: int,
        *,
        admission: bool = False,
    ) -> int:
        """Free blocks that `num_tokens` slots would cost: new ones, and hits still in the queue.

        `admission` caps the need of kinds that give blocks back while they prefill.
        """
        num_required = -(-num_tokens // self.block_size)
        if admission:
            num_required = self.max_blocks_held(num_tokens)
        table = self.tables.get(request_id)
        num_held = len(table) if table else 0
        if request_id in self._num_registered:
            return num_required - num_held if num_required > num_held else 0
        num_skipped = self.num_skipped_tokens(total_computed_tokens) // self.block_size
        num_new = max(num_required - max(num_skipped, len(hit_blocks) + num_held), 0)
        return num_new + self._pool.count_free(hit_blocks[max(0, num_skipped - num_held) :])

    def add_hit_blocks(
        self, request_id: str, hit_blocks: Sequence[int], total_computed_tokens: int
    ) -> None:
        """Start the request's table with its hits, pinned; skipped positions become null."""
        num_skipped = self.num_skipped_tokens(total_computed_tokens) // self.block_size
        visible = hit_blocks[num_skipped:]
        self._pool.touch(visible)
        table = self.tables.setdefault(request_id, [])
        table.extend([NULL_BLOCK_ID] * num_skipped)
        table.extend(visible)
        self._num_registered[request_id] = len(table)

    def add_external_blocks(
        self, request_id: str, num_local_tokens: int, num_external_tokens: int
    ) -> None:
        """Take blocks for tokens whose KV a connector will load, unless all are out of sight."""
        total = num_local_tokens + num_external_tokens
        if min(total - self.num_skipped_tokens(total), num_external_tokens) > 0:
            self.allocate_new_blocks(request_id, total)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        """Grow the table to hold `num_tokens`; the ids added, possibly none."""
        table = self.tables.setdefault(request_id, [])
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return []
        blocks = self._pool.take(num_new)
        table.extend(blocks)
        return blocks

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable that are not yet."""
        first = self._num_registered.get(request.request_id, 0)
        end = num_tokens // self.block_size
        if first >= end:
            return
        table = self.tables[request.request_id]
        hashes = rescale_block_hashes(request.block_hashes, self._hash_block_size, self.block_size)
        indices = self._reachable_blocks(request, table, first, end)
        if indices is None:
            self._pool.register(table[first:end], hashes[first:end], self._group_id)
        else:
            self._pool.register(
                [table[i] for i in indices], [hashes[i] for i in indices], self._group_id
            )
        self._num_registered[request.request_id] = end
        if self._events is not None:
            stored = range(first, end) if indices is None else indices
            self._events.stored(
                request, self.spec, self._group_id, hashes, range(first, end), stored
            )

    def drop_unwritten_hashes(self, request_id: str, num_written_tokens: int) -> None:
        """Forget the hashes of the request's blocks that hold a token not written yet."""
        table = self.tables.get(request_id, ())
        self._pool.evict(self._pool.cached_of(table[num_written_tokens // self.block_size :]))

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back blocks that no later query can see, tail first; they become null."""
        num_skipped = self.num_skipped_tokens(total_computed_tokens) // self.block_size
        table = self.tables.get(request_id)
        if not num_skipped or table is None:
            return
        freed = []
        for i in range(min(num_skipped, len(table)) - 1, -1, -1):
            if table[i] == NULL_BLOCK_ID:
                break
            freed.append(table[i])
            table[i] = NULL_BLOCK_ID
        self._pool.free(freed)

    def pop(self, request_id: str) -> list[int]:
        """Forget the request and return its table; nothing if it has none."""
        self._num_registered.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Give back the request's blocks tail first, so that a chain's tail is evicted first."""
        self._pool.free(self.pop(request_id)[::-1])

    def _reachable_blocks(
        self, request: Request, table: list[int], first: int, end: int
    ) -> list[int] | None:
        """Table indices in [first, end) that a lookup can ever reach; None means all."""
        return None


class FullAttentionManager(SingleTypeKVCacheManager):
    """Blocks are held to the end; a hit is a run of blocks from the start."""

    def find_longest_cache_hit(
        self,
        block_hashes: list[BlockHash],
        max_length: int,
        group_ids: Sequence[int],
        *,
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> BlockIds:
        size = self.block_size
        hashes = rescale_block_hashes(block_hashes, self._hash_block_size, size)
        runs = self._pool.find_longest_run(hashes, max_length // size, group_ids)
        length = len(runs[0])
        if drop_eagle_block and length:
            length -= 1
        length -= (length * size % alignment_tokens) // size
        for run in runs:
            del run[length:]
        return runs

    def num_common_prefix_blocks(self, request_id: str) -> int:
        ref_counts, num_requests = self._pool.ref_counts, len(self.tables)
        num_common = 0
        for block in self.tables.get(request_id, ()):
            if ref_counts[block] != num_requests:
                break
            num_common += 1
        return num_common
