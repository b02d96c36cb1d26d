"""One large gather, split by rows among threads (`mover_threads`).

The log's order stays: the mover takes part in the gather and goes on when all parts are done.
Writes are not split, since of two rows for one slot the later must stay (H4).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from slotmirror.core.backend import DeviceBackend, HostRows, SlotIndex
from slotmirror.core.errors import without_tracebacks
from slotmirror.core.runtime import Runtime, Thread

SPLIT_BYTES_MIN = 8 << 20
"""Bytes of a part: what is smaller is done before a helper has started."""


def split_gather(
    backend: DeviceBackend,
    runtime: Runtime,
    threads: int,
    pool: HostRows,
    slots: SlotIndex,
    out: HostRows,
) -> None:
    """`backend.gather_slots`, by up to `threads` threads, the caller's one of them, if it is large.

    No locks. Raises the first failure of a part, once nobody writes to `out` any more.
    """
    parts = min(threads, len(slots) * out.itemsize // SPLIT_BYTES_MIN)
    if parts < 2:
        backend.gather_slots(pool, slots, out)
        return
    failures: list[BaseException] = []

    def gather(slots: SlotIndex, out: HostRows) -> None:
        try:
            backend.bind_thread(backend.device)
            backend.gather_slots(pool, slots, out)
        except BaseException as error:
            failures.append(without_tracebacks(error))

    own, *others = zip(np.array_split(slots, parts), np.array_split(out, parts), strict=True)
    helpers: list[Thread] = []
    try:
        for number, piece in enumerate(others):
            name = f"slotmirror-mover-helper-{number}"
            helpers.append(runtime.start_thread(name, partial(gather, *piece)))
        gather(*own)
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]
