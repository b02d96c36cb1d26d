"""What the scheduler asks for: hits and slots (seed 2; spec kv 2, 4)."""

from slotmirror.kvcache.block_pool import BlockIds, PoolObserver
from slotmirror.kvcache.coordinator import (
    CoordinatorOptions,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from slotmirror.kvcache.events import KVCacheEvent, KVEventLog
from slotmirror.kvcache.hybrid_coordinator import HybridKVCacheCoordinator
from slotmirror.kvcache.request import Request, RequestStatus
from slotmirror.kvcache.specs import KVCacheConfig, SlidingWindowSpec, resolve_block_sizes
from slotmirror.kvcache.stats import PrefixCacheStats

_RUNNING = RequestStatus.RUNNING


class KVCacheManager:
    """Prefix lookup, block allocation and release. Owned by the engine thread; no locks.

    `watermark` is the share of the pool that admissions leave free while others run, so that
    running requests can grow without preempting (public issues 25538, 28018).
    """

    def __init__(
        self,
        config: KVCacheConfig,
        max_model_len: int,
        *,
        max_num_batched_tokens: int | None = None,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        watermark: float = 0.0,
        retention_interval: int | None = None,
        events: KVEventLog | None = None,
        observer: PoolObserver | None = None,
    ) -> None:
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        scheduler_block_size, hash_block_size = resolve_block_sizes(
            config.groups, enable_caching=enable_caching, hash_block_size=hash_block_size
        )
        check_retention_interval(config, retention_interval, scheduler_block_size)
        options = CoordinatorOptions(
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens or max_model_len,
            use_eagle=use_eagle,
            retention_interval=retention_interval,
            events=events,
            observer=observer,
        )
        self.config = config
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.coordinator = make_coordinator(config, options, enable_caching)
        self.pool = self.coordinator.pool
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * config.num_blocks)
        self._events = events
        self._stats = PrefixCacheStats()
        self._no_blocks: BlockIds = tuple([[] for _ in config.groups])

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0.0 to 1.0."""
        return self.pool.usage

    @property
    def min_hit_tokens(self) -> int:
        """Hits are multiples of this; a shorter shared prefix never hits (public issue 54607)."""
        return self.coordinator.scheduler_block_size

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]:
        """The cached blocks per group that the request can start with, and their tokens.

        The last token is always computed, for its logits; hence of a fully cached prompt of k
        whole blocks k - 1 hit. Nothing is pinned or counted: pass the result to
        `allocate_slots` before anything else is allocated.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self._empty(), 0
        return self.coordinator.find_longest_cache_hit(
            request.block_hashes, len(request.all_token_ids) - 1
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: BlockIds | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> BlockIds | None:
        """Slots for `num_new_tokens` more tokens: the new block ids per group, or None.

        None means too few free blocks, and changed nothing but blocks that left a sliding
        window. Full blocks become findable at once, before they are written: whoever preempts a
        request in its own step must call `drop_unwritten_hashes`.

        Args:
            num_new_computed_tokens, new_computed_blocks: hits, only at a first allocation.
            num_lookahead_tokens: slots beyond the new tokens, for a draft model.
            num_external_computed_tokens: tokens whose KV a connector loads.
            delay_cache_blocks: register nothing; `register_full_blocks` will, once loaded.
            full_sequence_must_fit: refuse unless the whole request would fit now.
            reserved_blocks: free blocks that must be left.
            has_scheduled_reqs: whether others run, so that the watermark holds for this one.

        Raises ValueError, changing nothing, if no tokens are given, or hits of a request that
        holds blocks already.
        """
        request_id, coordinator = request.request_id, self.coordinator
        hits = new_computed_blocks or self._no_blocks
        self._check_allocation(request_id, num_new_tokens + num_external_computed_tokens, hits)
        is_admission = request.status is not _RUNNING
        headroom = self.watermark_blocks if has_scheduled_reqs and is_admission else 0
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_known = num_local + num_external_computed_tokens
        num_computed = min(num_known, self.max_model_len)
        if full_sequence_must_fit and not self._fits_whole(request, hits, num_computed, headroom):
            return None

        num_slots = min(num_computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        coordinator.remove_skipped_blocks(request_id, num_computed)
        needed = coordinator.num_blocks_needed(request_id, num_slots, hits, num_known)
        if needed + headroom > self.pool.num_free_blocks - reserved_blocks:
            return None

        if num_external_computed_tokens or any(hits):
            coordinator.add_computed_blocks(
                request_id, hits, num_local, num_external_computed_tokens
            )
        new_blocks = coordinator.allocate_new_blocks(request_id, num_slots)
        if is_admission:
            self._count_admission(request, num_new_computed_tokens)
        if self.enable_caching and not delay_cache_blocks:
            # Draft tokens beyond the known ones may be rejected: they are never registered.
            num_final = min(num_computed + num_new_tokens, request.num_tokens, num_slots)
            coordinator.register_full_blocks(request, num_final)
        return new_blocks

    def register_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make blocks findable that `allocate_slots` was told to delay, once they are loaded."""
        if self.enable_caching:
            self.coordinator.register_full_blocks(request, num_computed_tokens)

    def drop_unwritten_hashes(self, request: Request) -> None:
        """Forget hashes of blocks that this step would have filled beyond the computed tokens.

        For a request that is preempted in the step in which it was scheduled: its new blocks are
        registered but will never be written (public issues 43569, 57580, 41838).
        """
        self.coordinator.drop_unwritten_hashes(request.request_id, request.num_computed_tokens)

    def free(self, request: Request) -> None:
        """Give back the request's blocks, tail first; nothing for a request without blocks."""
        self.coordinator.free(request.request_id)

    def pop_blocks(self, request: Request) -> list[int]:
        """Forget the request but keep its blocks in use; `pool.free` takes them later, as they
        are."""
        return self.coordinator.pop(request.request_id)

    def max_blocks_held(self, num_tokens: int) -> int:
        """Most blocks that a request of this many tokens ever holds, over all groups."""
        return self.coordinator.max_blocks_held(num_tokens)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop the hashes of these blocks, also of blocks in use."""
        self.pool.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drop every hash, after new weights or discarded KV; False if blocks are in use."""
        if not self.pool.reset():
            return False
        self._stats.reset = True
        return True

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Per group, leading blocks shared by all requests with blocks; zeros if it is unknown."""
        return self.coordinator.num_common_prefix_blocks(request_id)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """A copy of the request's block table per group."""
        return self.coordinator.get_block_ids(request_id)

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call; none unless events are on."""
        return self._events.take() if self._events is not None else []

    def make_prefix_cache_stats(self) -> PrefixCacheStats:
        """Statistics since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def _check_allocation(self, request_id: str, num_tokens: int, hits: BlockIds) -> None:
        if not num_tokens:
            raise ValueError(
                f"request {request_id!r}: num_new_tokens must be > 0 "
                "unless external tokens come with it"
            )
        if any(hits) and self.coordinator.holds_blocks(request_id):
            raise ValueError(f"request {request_id!r} holds blocks already: it takes no hits")

    def _fits_whole(
        self, request: Request, hits: BlockIds, num_computed_tokens: int, headroom: int
    ) -> bool:
        """Whether all known tokens would fit now, not just those of this step."""
        num_tokens = min(request.num_tokens, self.max_model_len)
        needed = self.coordinator.num_blocks_needed(
            request.request_id, num_tokens, hits, num_computed_tokens, admission=True
        )
        return needed + headroom <= self.pool.num_free_blocks

    def _count_admission(self, request: Request, num_hits: int) -> None:
        if request.num_computed_tokens:
            return
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_hits
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self._stats.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)

    def _empty(self) -> BlockIds:
        return tuple([[] for _ in self.config.groups])


def make_coordinator(
    config: KVCacheConfig, options: CoordinatorOptions, enable_caching: bool
) -> KVCacheCoordinator:
    """The coordinator for this many groups, or the one that caches nothing."""
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(config, options)
    if len(config.groups) == 1:
        return UnitaryKVCacheCoordinator(config, options)
    return HybridKVCacheCoordinator(config, options)


def check_retention_interval(
    config: KVCacheConfig, retention_interval: int | None, scheduler_block_size: int
) -> None:
    """Raise ValueError for an interval that has no effect or ends no hit."""
    if retention_interval is None:
        return
    if not any(isinstance(group.spec, SlidingWindowSpec) for group in config.groups):
        raise ValueError(
            f"retention_interval={retention_interval} needs a sliding-window group; leave it unset"
        )
    if retention_interval < 0 or retention_interval % scheduler_block_size:
        raise ValueError(
            f"retention_interval={retention_interval} must be a non-negative multiple of the "
            f"scheduler block size {scheduler_block_size}"
        )
