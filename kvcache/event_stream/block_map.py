"""What a consumer of KV events knows: which blocks an engine has."""

from collections import Counter
from collections.abc import Iterable

from slotmirror.kvcache.events import (
    BlockRemoved,
    BlockStored,
    ExternalBlockHash,
    KVCacheEvent,
)

BlockKey = tuple[int | None, ExternalBlockHash]
"""KV-cache group and block hash."""


class BlockMap:
    """Blocks per (group, hash), rebuilt from events alone. One thread.

    A hash may stand for several blocks, and each removal is reported: a hash is gone when all of
    them are.
    """

    def __init__(self) -> None:
        self.num_blocks: Counter[BlockKey] = Counter()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.num_blocks

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Take in events in their order.

        Raises ValueError for the removal of a block that is not here: a batch is missing.
        """
        for event in events:
            if isinstance(event, BlockStored):
                self.num_blocks.update((event.group_idx, h) for h in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._remove((event.group_idx, block_hash))
            else:
                self.num_blocks.clear()

    def _remove(self, key: BlockKey) -> None:
        if key not in self.num_blocks:
            raise ValueError(f"block {key} was removed but never stored: a batch is missing")
        self.num_blocks[key] -= 1
        if not self.num_blocks[key]:
            del self.num_blocks[key]
