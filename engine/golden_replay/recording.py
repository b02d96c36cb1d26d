"""Observation and notation that manager and scheduler traces share."""

from collections.abc import Mapping, Sequence
from typing import Any

from slotmirror.engine.golden_replay.errors import VectorFileError, known
from slotmirror.kvcache.block_hashing import get_request_block_hasher
from slotmirror.kvcache.block_pool import BlockIds, PoolObserver
from slotmirror.kvcache.events import BlockRemoved, BlockStored, KVCacheEvent, KVEventLog
from slotmirror.kvcache.hash_functions import (
    HASH_FUNCTIONS,
    SEED_VARIABLE,
    BlockHash,
    KeyFormat,
    init_start_value,
)
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import BlockHasher, Request
from slotmirror.kvcache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from slotmirror.kvcache.stats import PrefixCacheStats

Recorded = Mapping[str, Any]

TRACE_SEED = "0"
_HASH_HEX_DIGITS = 16


class EvictionRecorder(PoolObserver):
    """Every [block, hash, group] that left the map, in order."""

    def __init__(self) -> None:
        self._evicted: list[list[object]] = []

    def on_hash_dropped(self, block_id: int, block_hash: BlockHash, group_id: int) -> None:
        self._evicted.append([block_id, short_hash(block_hash), group_id])

    def take(self) -> list[list[object]]:
        evicted, self._evicted = self._evicted, []
        return evicted


class RecordingManager(KVCacheManager):
    """A manager that also counts lookups as 0.25.1 did: every one, also of a request that is
    then not admitted. Ours counts admissions (X5), so traces are compared with `lookups`."""

    def __init__(self, config: KVCacheConfig, max_model_len: int, **options: Any) -> None:
        self.evictions = EvictionRecorder()
        options["observer"] = self.evictions
        options["events"] = KVEventLog(KeyFormat.V0_25, use_int_block_hashes=False)
        super().__init__(config, max_model_len, **options)
        self.lookups = PrefixCacheStats()

    def get_computed_blocks(self, request: Request) -> tuple[BlockIds, int]:
        blocks, num_hits = super().get_computed_blocks(request)
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self.lookups.record(request.num_tokens, num_hits, preempted=request.num_preemptions > 0)
        return blocks, num_hits

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        self.lookups.reset |= done
        return done

    def take_lookups(self) -> dict[str, object]:
        lookups, self.lookups = self.lookups, PrefixCacheStats()
        return vars(lookups)


def trace_hasher(config: Recorded, hash_block_size: int) -> BlockHasher:
    """The hasher of a trace: key format `v0_25`, seed "0"."""
    algo = config.get("algo", "sha256")
    hash_function = known(HASH_FUNCTIONS, algo, "hash algorithm")
    start_value = init_start_value(algo, KeyFormat.V0_25, {SEED_VARIABLE: TRACE_SEED})
    return get_request_block_hasher(hash_block_size, hash_function, start_value, KeyFormat.V0_25)


def trace_groups(recorded_groups: Sequence[Recorded]) -> tuple[KVCacheGroupSpec, ...]:
    """Raises VectorFileError for a kind of group that traces of this format do not have."""
    groups = []
    for recorded in recorded_groups:
        kind, block_size = recorded["type"], recorded["block_size"]
        if kind == "full":
            groups.append(KVCacheGroupSpec(FullAttentionSpec(block_size)))
        elif kind == "swa":
            spec = SlidingWindowSpec(block_size, sliding_window=recorded["window"])
            groups.append(KVCacheGroupSpec(spec))
        else:
            raise VectorFileError(f"group type {kind!r} is not one of full, swa")
    return tuple(groups)


def short_hash(block_hash: bytes) -> str:
    return block_hash.hex()[:_HASH_HEX_DIGITS]


def plain_events(events: Sequence[KVCacheEvent]) -> list[dict[str, object]]:
    """Events in the notation of the traces."""
    return [_plain_event(event) for event in events]


def plain_keys(keys: object) -> object:
    """Extra keys as JSON shows them: tuples as lists, bytes as hex."""
    if isinstance(keys, bytes):
        return keys.hex()
    if isinstance(keys, tuple | list):
        return [plain_keys(key) for key in keys]
    return keys


def _plain_event(event: KVCacheEvent) -> dict[str, object]:
    if isinstance(event, BlockStored):
        return {
            "t": "stored",
            "h": [_plain_hash(block_hash) for block_hash in event.block_hashes],
            "p": _plain_hash(event.parent_block_hash),
            "n_tok": len(event.token_ids),
            "bs": event.block_size,
            "g": event.group_idx,
            "lora": event.lora_name,
            "xk": plain_keys(event.extra_keys),
        }
    if isinstance(event, BlockRemoved):
        return {
            "t": "removed",
            "h": [_plain_hash(block_hash) for block_hash in event.block_hashes],
            "g": event.group_idx,
        }
    return {"t": "cleared"}


def _plain_hash(block_hash: bytes | int | None) -> str | None:
    return short_hash(block_hash) if isinstance(block_hash, bytes) else None
