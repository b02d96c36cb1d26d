"""Debug mode: our slots against the engine's own, every step, before a wrong row is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from slotmirror.adapters.errors import SlotMismatchError
from slotmirror.core.events import Int64Array, StepEvents, ranges


def check_slots(
    events: StepEvents, row_order: Sequence[str], engine_slots: object, num_tokens: int
) -> None:
    """Raise `SlotMismatchError` at the first token whose slot differs.

    `row_order` is the runner's order of requests; `engine_slots` its slot mapping, (≥ num_tokens,)
    per layer, or a list of such per micro-batch. Reads a device tensor back: for debugging only.
    """
    theirs = _slots_of(engine_slots)
    if theirs is None or len(theirs) < num_tokens:
        raise SlotMismatchError(
            "debug_slots: this model runner shows no slot mapping that covers the step's "
            f"{num_tokens} tokens; switch debug_slots off"
        )
    ours, owners, positions = _in_row_order(events, row_order)
    wrong = np.flatnonzero(ours != theirs[:num_tokens])
    if not len(wrong):
        return
    row = int(wrong[0])
    raise SlotMismatchError(
        f"row {row} of {num_tokens}, request {row_order[int(owners[row])]!r}, position "
        f"{int(positions[row])}: the engine writes slot {int(theirs[row])}, its scheduler's output "
        f"says {int(ours[row])}; {len(wrong)} rows of this step differ"
    )


def _in_row_order(
    events: StepEvents, row_order: Sequence[str]
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Slots, requests (as indices of `row_order`) and positions, row by row."""
    index = {req_id: i for i, req_id in enumerate(events.req_ids)}
    order = np.fromiter((index[req_id] for req_id in row_order), np.int64, len(row_order))
    counts = events.num_tokens[order]
    offsets = (np.cumsum(events.num_tokens) - events.num_tokens)[order]
    within = ranges(counts)
    slots = events.slots[np.repeat(offsets, counts) + within]
    owners = np.repeat(np.arange(len(order), dtype=np.int64), counts)
    return slots, owners, np.repeat(events.first_positions[order], counts) + within


def _slots_of(engine_slots: object) -> Int64Array | None:
    """One layer's mapping; the layers of the one KV group share theirs."""
    if isinstance(engine_slots, list):
        parts = [part for part in map(_slots_of, engine_slots) if part is not None]
        return np.concatenate(parts) if parts else None
    if isinstance(engine_slots, Mapping):
        engine_slots = next(iter(engine_slots.values()), None)
    if not isinstance(engine_slots, torch.Tensor):
        return None
    slots: Int64Array = engine_slots.detach().to("cpu", torch.int64).numpy()
    return slots
