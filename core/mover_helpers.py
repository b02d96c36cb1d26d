"""Helper threads among which one large gather is split by rows (`mover_threads`).

The log's order stays: the mover takes part in the gather and goes on when all parts are done.
Writes are not split, since of two rows for one slot the later must stay (H4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from slotmirror.core.backend import DeviceBackend, HostRows, SlotIndex
from slotmirror.core.errors import without_tracebacks
from slotmirror.core.runtime import Runtime, Thread

SPLIT_BYTES_MIN = 4 << 20
"""Smaller gathers are over before a helper has woken."""


class MoverHelpers:
    """`threads - 1` helpers beside the mover; started with the first large gather (T7)."""

    def __init__(self, backend: DeviceBackend, runtime: Runtime, threads: int) -> None:
        self._backend = backend
        self._runtime = runtime
        self._threads = threads
        self._changed = runtime.condition(runtime.lock("helpers"))
        self._parts: deque[Callable[[], None] | None] = deque()
        """What is to be gathered; None ends one helper."""
        self._unfinished = 0
        self._failure: BaseException | None = None
        self._started: list[Thread] = []

    def gather(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        """`backend.gather_slots`, split if it is large; the mover's thread, without locks."""
        parts = min(self._threads, len(slots) * out.itemsize // SPLIT_BYTES_MIN)
        if parts < 2:
            self._backend.gather_slots(pool, slots, out)
            return
        while len(self._started) < self._threads - 1:
            name = f"slotmirror-mover-helper-{len(self._started)}"
            self._started.append(self._runtime.start_thread(name, self._main))
        pieces = zip(np.array_split(slots, parts), np.array_split(out, parts), strict=True)
        own, *others = [partial(self._backend.gather_slots, pool, *piece) for piece in pieces]
        with self._changed:
            self._parts.extend(others)
            self._unfinished = len(others)
            self._failure = None
            self._changed.notify_all()
        try:
            own()
        finally:
            # Also when our part failed: the others still write to `out`.
            with self._changed:
                while self._unfinished:
                    self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the helpers and join them; the mover has ended."""
        with self._changed:
            self._parts.extend([None] * len(self._started))
            self._changed.notify_all()
        for thread in self._started:
            thread.join()

    def _main(self) -> None:
        while (part := self._take()) is not None:
            failure: BaseException | None = None
            try:
                self._backend.bind_thread(self._backend.device)
                part()
            except BaseException as error:
                failure = without_tracebacks(error)
            del part
            with self._changed:
                self._failure = self._failure or failure
                self._unfinished -= 1
                self._changed.notify_all()

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._parts:
                self._changed.wait()
            return self._parts.popleft()
