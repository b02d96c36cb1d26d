"""The groups of a model behind one interface (seed 2; spec kv 5)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from slotmirror.kvcache.block_pool import BlockIds, BlockPool, PoolObserver
from slotmirror.kvcache.events import KVEventLog
from slotmirror.kvcache.hash_functions import BlockHash
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.single_type_manager import FullAttentionManager, SingleTypeKVCacheManager
from slotmirror.kvcache.sliding_window_manager import SlidingWindowManager
from slotmirror.kvcache.specs import KVCacheConfig, SlidingWindowSpec


@dataclass(frozen=True)
class CoordinatorOptions:
    """What all coordinators need beside the groups. Sizes and lengths in tokens."""

    scheduler_block_size: int
    hash_block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    use_eagle: bool = False
    retention_interval: int | None = None
    events: KVEventLog | None = None
    observer: PoolObserver | None = None


class KVCacheCoordinator(ABC):
    """One manager per group over one pool; calls go to all groups, in their order."""

    def __init__(self, config: KVCacheConfig, options: CoordinatorOptions) -> None:
        self.scheduler_block_size = options.scheduler_block_size
        self.pool = BlockPool(
            config.num_blocks,
            len(config.groups),
            events=options.events,
            observer=options.observer,
        )
        self.eagle_group_ids = {i for i, g in enumerate(config.groups) if g.is_eagle_group}
        if options.use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(config.groups)))
        self.managers = tuple(
            _make_manager(config, i, self.pool, options, i in self.eagle_group_ids)
            for i in range(len(config.groups))
        )
        self._windowed_managers = tuple(
            manager for manager in self.managers if manager.spec.window_tokens is not None
        )

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlockIds, int]:
        """Blocks per group and length in tokens of the longest cached prefix; changes nothing."""

    @abstractmethod
    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the request's full blocks of its first `num_tokens` tokens findable."""

    def num_blocks_needed(
        self,
        request_id: str,
        num_tokens: int,
        hit_blocks: BlockIds,
        total_computed_tokens: int,
        *,
        admission: bool = False,
    ) -> int:
        """Free blocks that `num_tokens` slots would cost over all groups."""
        needed = 0
        for manager, blocks in zip(self.managers, hit_blocks, strict=True):
            needed += manager.num_blocks_needed(
                request_id, num_tokens, blocks, total_computed_tokens, admission=admission
            )
        return needed

    def holds_blocks(self, request_id: str) -> bool:
        return any(request_id in manager.tables for manager in self.managers)

    def max_blocks_held(self, num_tokens: int) -> int:
        """Most blocks that a request of this many tokens ever holds, over all groups."""
        return sum(manager.max_blocks_held(num_tokens) for manager in self.managers)

    def add_computed_blocks(
        self,
        request_id: str,
        hit_blocks: BlockIds,
        num_local_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Start the request's tables with its hits, then blocks for external tokens.

        All groups' hits are pinned before any block is taken, so that no group takes another
        one's hit (public issues 10507, 33775).
        """
        if any(manager.is_tracked(request_id) for manager in self.managers):
            return
        total = num_local_tokens + num_external_tokens
        for manager, blocks in zip(self.managers, hit_blocks, strict=True):
            manager.add_hit_blocks(request_id, blocks, total)
        if num_external_tokens:
            for manager in self.managers:
                manager.add_external_blocks(request_id, num_local_tokens, num_external_tokens)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> BlockIds:
        """Grow the request's tables to `num_tokens`; the ids added per group."""
        return tuple([m.allocate_new_blocks(request_id, num_tokens) for m in self.managers])

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back blocks that left every window."""
        for manager in self._windowed_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens)

    def drop_unwritten_hashes(self, request_id: str, num_written_tokens: int) -> None:
        """Forget hashes of the request's blocks beyond what was written."""
        for manager in self.managers:
            manager.drop_unwritten_hashes(request_id, num_written_tokens)

    def free(self, request_id: str) -> None:
        """Give back the request's blocks, group by group, each tail first."""
        for manager in self.managers:
            manager.free(request_id)

    def pop(self, request_id: str) -> list[int]:
        """Forget the request; its blocks of all groups, in the order in which to free them."""
        return [block for m in self.managers for block in reversed(m.pop(request_id))]

    def num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Per group, the leading blocks that all requests with blocks share."""
        return [manager.num_common_prefix_blocks(request_id) for manager in self.managers]

    def get_block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's table per group; empty for an unknown request."""
        return tuple([list(manager.tables.get(request_id, ())) for manager in self.managers])


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Prefix caching off: nothing is found and nothing registered, for any number of groups."""

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlockIds, int]:
        return (), 0

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        return None

    def num_common_prefix_blocks(self, request_id: str) -> list[int]:
        return [0] * len(self.managers)


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group: its blocks are what is hashed and what hits are counted in."""

    def __init__(self, config: KVCacheConfig, options: CoordinatorOptions) -> None:
        super().__init__(config, options)
        (self._manager,) = self.managers

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[BlockIds, int]:
        size = self._manager.block_size
        hits = self._manager.find_longest_cache_hit(
            block_hashes,
            max_cache_hit_length,
            (0,),
            drop_eagle_block=0 in self.eagle_group_ids,
            alignment_tokens=size,
        )
        return hits, len(hits[0]) * size

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        self._manager.register_full_blocks(request, num_tokens)

    # The two below are what every decode step of every request runs: the loops over groups would
    # be a third of its time.

    def num_blocks_needed(
        self,
        request_id: str,
        num_tokens: int,
        hit_blocks: BlockIds,
        total_computed_tokens: int,
        *,
        admission: bool = False,
    ) -> int:
        return self._manager.num_blocks_needed(
            request_id, num_tokens, hit_blocks[0], total_computed_tokens, admission=admission
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> BlockIds:
        return (self._manager.allocate_new_blocks(request_id, num_tokens),)


def _make_manager(
    config: KVCacheConfig,
    group_id: int,
    pool: BlockPool,
    options: CoordinatorOptions,
    use_eagle: bool,
) -> SingleTypeKVCacheManager:
    spec = config.groups[group_id].spec
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowManager(
            spec,
            pool,
            group_id,
            hash_block_size=options.hash_block_size,
            scheduler_block_size=options.scheduler_block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            use_eagle=use_eagle,
            retention_interval=options.retention_interval,
            events=options.events,
        )
    return FullAttentionManager(
        spec,
        pool,
        group_id,
        hash_block_size=options.hash_block_size,
        scheduler_block_size=options.scheduler_block_size,
        use_eagle=use_eagle,
        events=options.events,
    )


def group_ids_by_spec(config: KVCacheConfig) -> list[Sequence[int]]:
    """Ids of the groups with equal specs, full attention first, else in order of appearance."""
    by_spec: dict[object, list[int]] = {}
    for group_id, group in enumerate(config.groups):
        by_spec.setdefault(group.spec, []).append(group_id)
    return sorted(
        by_spec.values(), key=lambda ids: isinstance(config.groups[ids[0]].spec, SlidingWindowSpec)
    )
