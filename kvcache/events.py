"""KV events: what an outside consumer is told about the cached blocks (spec kv 7)."""

from collections.abc import Sequence
from dataclasses import dataclass

from slotmirror.kvcache.extra_keys import ExtraKeys, generate_block_hash_extra_keys
from slotmirror.kvcache.hash_functions import BlockHash, KeyFormat
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.specs import AttentionSpec

ExternalBlockHash = bytes | int

MEDIUM_GPU = "GPU"
_INT_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became findable: one event per registration.

    `token_ids` are those of the whole registered range, also of blocks left out of
    `block_hashes` because nothing can hit them; `extra_keys` has one entry per hash. The parent
    is None when the range starts at the first block.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One block left the map. Another may still hold the same hash: consumers must count."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole map was dropped."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def external_block_hash(block_hash: BlockHash, use_int_block_hashes: bool) -> ExternalBlockHash:
    """The hash as consumers see it: its last 8 bytes as an unsigned integer, or raw."""
    if use_int_block_hashes:
        return int.from_bytes(block_hash[-_INT_HASH_BYTES:], "big")
    return bytes(block_hash)


class KVEventLog:
    """Events in the order in which they happened, until somebody takes them.

    Bounded by its reader: the scheduler takes the events once per step.
    """

    def __init__(
        self, key_format: KeyFormat = KeyFormat.TAGGED, *, use_int_block_hashes: bool = True
    ) -> None:
        self._key_format = key_format
        self._use_int_block_hashes = use_int_block_hashes
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        request: Request,
        spec: AttentionSpec,
        group_id: int,
        block_hashes: Sequence[BlockHash],
        block_range: range,
        stored_blocks: Sequence[int],
    ) -> None:
        """Blocks `block_range` of the request were registered, of which `stored_blocks` (indices
        in the table) are findable. `block_hashes` are all of the request's, at the group's size."""
        size = spec.block_size
        first = block_range.start
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[self._external(block_hashes[i]) for i in stored_blocks],
                parent_block_hash=self._external(block_hashes[first - 1]) if first else None,
                token_ids=request.all_token_ids[first * size : block_range.stop * size],
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=[
                    generate_block_hash_extra_keys(
                        request, i * size, (i + 1) * size, self._key_format
                    )
                    for i in stored_blocks
                ]
                or None,
                group_idx=group_id,
                kv_cache_spec_kind=spec.kind,
                kv_cache_spec_sliding_window=spec.window_tokens,
            )
        )

    def removed(self, block_hash: BlockHash, group_id: int) -> None:
        self._events.append(BlockRemoved([self._external(block_hash)], MEDIUM_GPU, group_id))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def _external(self, block_hash: BlockHash) -> ExternalBlockHash:
        return external_block_hash(block_hash, self._use_int_block_hashes)
