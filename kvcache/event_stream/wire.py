"""KV events as bytes: one msgpack array per batch (spec kv 7).

A batch is `[ts, events, data_parallel_rank]`, an event a map whose first entry is its `type`;
optional fields that are None are left out. Functions only; usable from any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace

from slotmirror.kvcache.event_stream.requirements import load
from slotmirror.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from slotmirror.kvcache.extra_keys import ExtraKeys

_EVENT_TYPES: Mapping[str, type[KVCacheEvent]] = {
    event_type.__name__: event_type for event_type in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_FIELDS: Mapping[type[KVCacheEvent], Sequence[tuple[str, bool]]] = {
    event_type: [(field.name, field.default is MISSING) for field in fields(event_type)]
    for event_type in _EVENT_TYPES.values()
}
"""Per type of event: its fields in order, and whether each is written even if it is None."""


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one step; `ts` in seconds since the epoch, the rank within data parallelism."""

    ts: float
    events: Sequence[KVCacheEvent]
    data_parallel_rank: int | None = None


def encode_batch(batch: KVEventBatch) -> bytes:
    """The batch in the bytes that vLLM's consumers read.

    Raises ModuleNotFoundError without msgspec.
    """
    payload: bytes = load("msgspec.msgpack").encode(
        [batch.ts, [_as_map(event) for event in batch.events], batch.data_parallel_rank]
    )
    return payload


def decode_batch(payload: bytes) -> KVEventBatch:
    """The batch that `encode_batch` wrote, equal to it; fields of newer publishers are ignored.

    Raises ValueError for bytes that are no batch, ModuleNotFoundError without msgspec.
    """
    batch = load("msgspec.msgpack").decode(payload, type=tuple[float, list[dict], int | None])  # type: ignore[type-arg]
    ts, events, rank = batch
    return KVEventBatch(ts, [_as_event(event) for event in events], rank)


def _as_map(event: KVCacheEvent) -> dict[str, object]:
    values: dict[str, object] = {"type": type(event).__name__}
    for name, is_required in _FIELDS[type(event)]:
        value = getattr(event, name)
        if is_required or value is not None:
            values[name] = value
    return values


def _as_event(values: Mapping[str, object]) -> KVCacheEvent:
    event_type = _EVENT_TYPES.get(str(values.get("type")))
    if event_type is None:
        known = ", ".join(_EVENT_TYPES)
        raise ValueError(f"KV event type must be one of {known}, not {values.get('type')!r}")
    event: KVCacheEvent = load("msgspec").convert(values, event_type)
    if isinstance(event, BlockStored) and event.extra_keys is not None:
        return replace(event, extra_keys=[_as_tuples(keys) for keys in event.extra_keys])
    return event


def _as_tuples(keys: ExtraKeys) -> ExtraKeys:
    """msgpack has no tuples, but hashes do tell them from lists."""
    if keys is None:
        return None
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)
