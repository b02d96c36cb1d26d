"""Sliding-window groups: blocks behind the window are given back (spec kv 5)."""

from collections.abc import Sequence

from slotmirror.kvcache.block_hashing import rescale_block_hashes
from slotmirror.kvcache.block_pool import BlockIds, BlockPool
from slotmirror.kvcache.events import KVEventLog
from slotmirror.kvcache.free_queue import NULL_BLOCK_ID
from slotmirror.kvcache.hash_functions import BlockHash
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.single_type_manager import SingleTypeKVCacheManager
from slotmirror.kvcache.specs import SlidingWindowSpec


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A hit needs only the blocks of the window before its end; earlier positions are null."""

    def __init__(
        self,
        spec: SlidingWindowSpec,
        pool: BlockPool,
        group_id: int,
        *,
        hash_block_size: int,
        scheduler_block_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        use_eagle: bool = False,
        retention_interval: int | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        super().__init__(
            spec,
            pool,
            group_id,
            hash_block_size=hash_block_size,
            scheduler_block_size=scheduler_block_size,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            events=events,
        )
        self._window = spec.sliding_window
        # While prefilling, a request holds its window and one step's tokens; the window may
        # start anywhere in a block, hence one more.
        most_tokens = min(self._window - 1 + max_num_batched_tokens, max_model_len)
        self._max_blocks = -(-most_tokens // spec.block_size) + 1

    def max_blocks_held(self, num_tokens: int) -> int:
        return min(super().max_blocks_held(num_tokens), self._max_blocks)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self._window + 1)

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
        run = self._find_run(
            hashes, max_length // size, group_ids, drop_eagle_block, alignment_tokens
        )
        length = run.stop
        if drop_eagle_block and length:
            length -= 1
            length -= (length * size % alignment_tokens) // size
        tables: list[list[int]] = [[NULL_BLOCK_ID] * length for _ in group_ids]
        for i in range(run.start, length):
            found = self._pool.find(hashes[i], group_ids)
            assert found is not None
            for table, block in zip(tables, found, strict=True):
                table[i] = block
        return tuple(tables)

    def _find_run(
        self,
        hashes: list[BlockHash],
        max_blocks: int,
        group_ids: Sequence[int],
        drop_eagle_block: bool,
        alignment_tokens: int,
    ) -> range:
        """Block indices of the hit's contiguous end, searched right to left.

        The rightmost run that fills the window wins; without one, what hits from the first block
        on counts, cut to the alignment.
        """
        size, needed = self.block_size, self._blocks_per_window(drop_eagle_block)
        num_run = 0
        for i in range(max_blocks - 1, -1, -1):
            if self._pool.find(hashes[i], group_ids) is None:
                num_run = 0
                continue
            end = i if drop_eagle_block else i + 1
            if num_run == 0 and end * size % alignment_tokens:
                continue
            num_run += 1
            if num_run >= needed:
                return range(i, i + num_run)
        num_run -= (num_run * size % alignment_tokens) // size
        return range(num_run)

    def _blocks_per_window(self, with_eagle_block: bool) -> int:
        return -(-(self._window - 1) // self.block_size) + with_eagle_block

    def _reachable_blocks(
        self, request: Request, table: list[int], first: int, end: int
    ) -> list[int]:
        """Blocks that belong to the window of a hit at some aligned length.

        A draft head looks one block further (`shift`). With a retention interval only one
        boundary per interval is kept (0: none), and always the one where a repeat of this prompt
        would hit.
        """
        needed, shift = self._blocks_per_window(self.use_eagle), int(self.use_eagle)
        interval = self._retention_interval
        segment = self._scheduler_block_size if interval is None else interval
        per_segment = segment // self.block_size

        def closes_segment(i: int) -> bool:
            return i >= shift and (i - shift) % per_segment >= per_segment - needed

        if segment and needed >= per_segment:
            reachable = set(range(first, end))
        else:
            reachable = {i for i in range(first, end) if segment and closes_segment(i)}
            if interval is not None:
                alignment = self._scheduler_block_size
                replay = (request.num_prompt_tokens - 1) // alignment * alignment
                replay_end = replay // self.block_size + shift
                reachable.update(range(max(first, replay_end - needed), min(end, replay_end)))
        return [i for i in range(first, end) if i in reachable and table[i] != NULL_BLOCK_ID]
