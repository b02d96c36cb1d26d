"""Several kinds of attention over one pool: a hit must suit them all (spec kv 5)."""

from collections.abc import Sequence

from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.coordinator import (
    CoordinatorOptions,
    KVCacheCoordinator,
    group_ids_by_spec,
)
from slotmirror.kvcache.hash_functions import BlockHash
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.single_type_manager import FullAttentionManager
from slotmirror.kvcache.specs import KVCacheConfig


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Groups with equal specs are looked up together; kinds shorten the candidate in turn.

    Raises ValueError unless there are at least two distinct specs.
    """

    def __init__(self, config: KVCacheConfig, options: CoordinatorOptions) -> None:
        super().__init__(config, options)
        self._kinds = group_ids_by_spec(config)
        if len(self._kinds) < 2:
            raise ValueError(
                "several KV-cache groups with prefix caching need at least two distinct specs; "
                f"got {len(config.groups)} groups of {config.groups[0].spec}: merge them into one"
            )
        for group_ids in self._kinds:
            drops = any(group_id in self.eagle_group_ids for group_id in group_ids)
            for group_id in group_ids:
                self.managers[group_id].use_eagle = drops
        starts_full = isinstance(self.managers[self._kinds[0][0]], FullAttentionManager)
        self._one_pass_suffices = starts_full and len(self._kinds) == 2

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Only blocks below an aligned length can ever be hit; a draft head's group looks one
        block past it and drops that one again."""
        aligned = num_tokens - num_tokens % self.scheduler_block_size
        for manager in self.managers:
            limit = aligned
            if manager.use_eagle and aligned:
                limit = min(num_tokens, aligned + manager.block_size)
            manager.register_full_blocks(request, limit)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlockIds, int]:
        """Every kind accepts the candidate length or shortens it, until none does.

        One pass is enough for full attention and one other kind: the second can only shorten,
        and full attention accepts every shorter length.
        """
        search = _Search(self, block_hashes, max_cache_hit_length)
        length = max_cache_hit_length
        while True:
            candidate = length
            for kind, group_ids in enumerate(self._kinds):
                candidate = search.shorten(kind, group_ids, candidate)
            if candidate >= length:
                break
            length = candidate
            if self._one_pass_suffices:
                break
        for group_id, manager in enumerate(self.managers):
            del search.hits[group_id][length // manager.block_size :]
        return tuple(search.hits), length


class _Search:
    """State of one lookup: the hits per group so far, and what need not be done again."""

    def __init__(
        self,
        coordinator: HybridKVCacheCoordinator,
        block_hashes: list[BlockHash],
        max_cache_hit_length: int,
    ) -> None:
        self.hits: list[list[int]] = [[] for _ in coordinator.managers]
        self._coordinator = coordinator
        self._block_hashes = block_hashes
        self._max_length = max_cache_hit_length
        self._known_full: set[int] = set()
        self._dropped: set[int] = set()

    def shorten(self, kind: int, group_ids: Sequence[int], candidate: int) -> int:
        """The longest hit of this kind within the candidate length, in tokens.

        A draft head's drop is applied once per candidate, else each round would cost a block
        (public issues 32802, 40624). Full attention is looked up once: whatever is shorter hits.
        """
        manager = self._coordinator.managers[group_ids[0]]
        size = manager.block_size
        if kind in self._known_full:
            return candidate - candidate % size
        drop = manager.use_eagle and kind not in self._dropped
        found = manager.find_longest_cache_hit(
            self._block_hashes,
            min(candidate + size, self._max_length) if drop else candidate,
            group_ids,
            drop_eagle_block=drop,
            alignment_tokens=self._coordinator.scheduler_block_size,
        )
        length = len(found[0]) * size
        if drop:
            self._dropped.add(kind)
        elif length < candidate:
            self._dropped.clear()
        if isinstance(manager, FullAttentionManager):
            self._known_full.add(kind)
        for group_id, blocks in zip(group_ids, found, strict=True):
            self.hits[group_id] = blocks
        return length
