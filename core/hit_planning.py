"""What a step reads: one gather per key for all of its hits, planned when it starts (C2)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.events import StepEvents
from slotmirror.core.hits import Hits
from slotmirror.core.operations import GatherTask


def plan_gathers(
    events: StepEvents, hits: Hits, keys: Iterable[OpenKey], plane: DataPlane
) -> dict[str, GatherTask]:
    """One gather for each key that has a row anywhere in the step's hit spans, by name.

    Engine thread; allocates, so it is called without locks. Raises `HostMemoryLimitError` before
    anything is allocated (M3).
    """
    wanted = [key for key in keys if hits.present[:, key.index].any()]
    out_rows = events.total_tokens + len(hits)
    plane.buffers.check_hits(sum(out_rows * key.spec.row_bytes for key in wanted))
    # One index for the whole region of the hits: rows that are not the pool's are read from some
    # slot, and then zeroed or overwritten from the page.
    slots = np.zeros(hits.region_rows, dtype=np.int64)
    slots[hits.out_rows] = hits.spans.slots
    whose = f"for {len(hits.spans.request)} hits"
    gathers = {}
    for key in wanted:
        lease = plane.buffers.lease(out_rows * key.spec.row_bytes, for_hits=True)
        zero_rows = hits.out_rows[~hits.present[:, key.index]]
        num_rows = len(hits) - len(zero_rows)
        gathers[key.name] = GatherTask(whose, key, slots, zero_rows, num_rows, lease, plane.stats)
    plane.stats.hit_buffer_bytes_high = plane.buffers.hit_bytes_high
    return gathers
