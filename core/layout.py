"""What a step's rows must fit, and the order in which they lie on its page (S4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import RowLayoutError
from slotmirror.core.events import Int64Array, StepEvents, offsets, ranges

_INT64 = np.dtype(np.int64)


def check_shape(events: StepEvents) -> None:
    """Raise `RowLayoutError` unless the arrays of a step fit each other (S4)."""
    counts, first = events.num_tokens, events.first_positions
    if not len(events.req_ids) == len(counts) == len(first):
        raise RowLayoutError(
            f"{len(events.req_ids)} scheduled requests, but {len(counts)} token counts and "
            f"{len(first)} first positions"
        )
    if not counts.dtype == first.dtype == events.slots.dtype == _INT64:
        raise RowLayoutError(
            f"num_tokens is {counts.dtype}, first_positions {first.dtype}, slots "
            f"{events.slots.dtype}: all must be int64"
        )
    if len(counts) and (np.minimum.reduce(counts) < 1 or np.minimum.reduce(first) < 0):
        odd = np.flatnonzero((counts < 1) | (first < 0)).tolist()
        raise RowLayoutError(
            f"requests {[events.req_ids[i] for i in odd]} are scheduled with no token or from a "
            "negative position"
        )
    total = np.add.reduce(counts)
    if total != len(events.slots):
        raise RowLayoutError(f"{total} scheduled tokens, but {len(events.slots)} slots")


def check_slots(events: StepEvents, config: PrefixCacheConfig) -> None:
    """Raise `RowLayoutError` unless every slot exists; the arrays fit each other (S4)."""
    slots = events.slots
    # A negative slot is a huge unsigned one, so one pass finds both.
    if not len(slots) or np.maximum.reduce(slots.view(np.uint64)) < config.num_slots:
        return
    bad = np.flatnonzero((slots < 0) | (slots >= config.num_slots))
    owner = np.repeat(np.arange(len(events.req_ids)), events.num_tokens)
    names = list(dict.fromkeys(events.req_ids[i] for i in owner[bad].tolist()))
    raise RowLayoutError(
        f"requests {names} write slots {slots[bad][:8].tolist()} outside "
        f"0..{config.num_slots - 1}: their block tables lack blocks, or num_blocks "
        f"({config.num_blocks}) and block_size ({config.block_size}) are not the engine's"
    )


def check_counts(events: StepEvents, num_tokens_unpadded: int, num_tokens_padded: int) -> None:
    """Raise `RowLayoutError` unless these are the step's token counts (S4)."""
    if num_tokens_unpadded != events.total_tokens:
        raise RowLayoutError(
            f"num_tokens_unpadded={num_tokens_unpadded}, but this step's requests were "
            f"scheduled for {events.total_tokens} tokens"
        )
    if num_tokens_padded < num_tokens_unpadded:
        raise RowLayoutError(
            f"num_tokens_padded={num_tokens_padded} is below "
            f"num_tokens_unpadded={num_tokens_unpadded}"
        )


def row_order(events: StepEvents, req_ids: Sequence[str] | None) -> Int64Array | None:
    """The order of requests on the page, as indices; None where it is the batch order.

    Raises `RowLayoutError` unless `req_ids` is an order of exactly the scheduled requests.
    """
    if req_ids is None or tuple(req_ids) == events.req_ids:
        return None
    index = {req_id: i for i, req_id in enumerate(events.req_ids)}
    if len(req_ids) != len(index) or set(req_ids) != index.keys():
        raise RowLayoutError(
            f"req_ids {list(req_ids)} is not an order of the requests scheduled in this step "
            f"{list(events.req_ids)}"
        )
    return np.fromiter((index[req_id] for req_id in req_ids), np.int64, len(index))


def batch_rows(events: StepEvents, order: Int64Array) -> Int64Array:
    """(n,) the row of each page row in batch order, the order of the step's slots."""
    counts = events.num_tokens[order]
    return np.repeat(offsets(events.num_tokens)[order], counts) + ranges(counts)


def ordered_slots(events: StepEvents, order: Int64Array | None) -> Int64Array:
    """(n,) the slot of each page row."""
    return events.slots if order is None else events.slots[batch_rows(events, order)]
