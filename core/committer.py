"""The one mover: carries out the log's operations in order, on a thread of its own or inline.

This is the only code that touches pool rows. Threaded and inline run the same loop over the same
operations, so their outputs are byte-identical (H5). The mover never takes the manager's lock and
needs no page (T3).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from slotmirror.core.backend import DeviceBackend, Fence, HostRows, SlotIndex
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import CopyAbandonedError, without_tracebacks
from slotmirror.core.oplog import Operation, OpLog, logger
from slotmirror.core.runtime import Thread

SPLIT_BYTES_MIN = 8 << 20
"""Bytes of a part of a split gather: what is smaller is done before a helper has started."""

_POLL_S = 0.25


class Committer:
    """Drains an `OpLog`. `kick` after every append; `stop` once."""

    def __init__(self, log: OpLog, backend: DeviceBackend, config: PrefixCacheConfig) -> None:
        self.backend = backend
        self._log = log
        self._config = config
        self._threaded = config.committer == "threaded"
        self._thread: Thread | None = None
        self._abandon_at = math.inf

    def gather(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        """`backend.gather_slots`, split by rows among up to `mover_threads` threads if it is large.

        This thread is one of them, and goes on when all parts are done: the log's order stays.
        Raises the first failure of a part, once nobody writes to `out` any more. Writes are not
        split, since of two rows for one slot the later must stay (H4).
        """
        threads = self._config.mover_threads
        parts = min(threads, len(slots) * out.itemsize // SPLIT_BYTES_MIN)
        if parts < 2:
            self.backend.gather_slots(pool, slots, out)
            return
        failures: list[BaseException] = []

        def gather_part(slots: SlotIndex, out: HostRows) -> None:
            try:
                self.backend.bind_thread(self.backend.device)
                self.backend.gather_slots(pool, slots, out)
            except BaseException as error:
                failures.append(without_tracebacks(error))

        own, *others = zip(np.array_split(slots, parts), np.array_split(out, parts), strict=True)
        helpers: list[Thread] = []
        try:
            for number, piece in enumerate(others):
                name = f"slotmirror-mover-helper-{number}"
                helpers.append(self._log.runtime.start_thread(name, partial(gather_part, *piece)))
            # A failure of ours goes first: it may be an interrupt.
            self.backend.gather_slots(pool, *own)
        finally:
            for helper in helpers:
                helper.join()
        if failures:
            raise failures[0]

    def kick(self) -> None:
        """Operations were appended: inline, carry them out here; the thread wakes by itself.

        In inline mode a second thread that appends meanwhile leaves its operations to the first.
        """
        if not self._threaded:
            self._main(block=False)

    def start(self) -> None:
        """Start the thread on first use (T7); before any state changes, since it may fail."""
        if self._threaded and self._thread is None:
            self._thread = self._log.runtime.start_thread("slotmirror-committer", self._main)

    def step(self, *, block: bool = False) -> bool:
        """Carry out one operation.

        False if there is none, or another thread is at it; with `block` if there never will be.
        """
        operation = self._log.take(block=block)
        if operation is not None:
            self._carry_out(operation)
        return operation is not None

    def wait_fence(self, fence: Fence) -> None:
        """Wait for a launched copy without limit, with a warning per `staging_claim_timeout_s`.

        A stalled peer rank must not kill the cache (W6). Only a shutdown that has given up ends
        it early, with `CopyAbandonedError`.
        """
        if fence.done():
            return
        self._log.stats.fence_waits += 1
        self._log.head_at_fence = True
        try:
            warn_s = self._config.staging_claim_timeout_s
            started = self._log.runtime.monotonic()
            warn_at = started + warn_s
            while not fence.wait(min(_POLL_S, warn_s)):
                now = self._log.runtime.monotonic()
                if now >= self._abandon_at:
                    raise CopyAbandonedError("shut down before the device had finished a copy")
                if now >= warn_at:
                    warn_at += warn_s
                    self._log.stats.fence_wait_warnings += 1
                    logger.warning("the device has not finished a copy for %.0f s", now - started)
        finally:
            self._log.head_at_fence = False

    def abandon_after(self, seconds: float) -> None:
        """From then on give up on copies that have not ended; their memory is never freed."""
        self._abandon_at = self._log.runtime.monotonic() + seconds

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread of a stopped log to end; True if none runs afterwards."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self, *, block: bool = True) -> None:
        self._bind()
        while self.step(block=block):
            pass

    def _bind(self) -> None:
        try:
            self.backend.bind_thread(self.backend.device)
        except BaseException as error:
            self._fail(error, "binding the mover's thread to its device")

    def _carry_out(self, operation: Operation) -> None:
        dropped = self._log.failure is not None
        try:
            carry_out = operation.drop if dropped else operation.run
            carry_out(self)
        # Whatever an operation throws is the log's first failure, SystemExit included: a mover
        # that ends silently would leave every waiter to its time-out.
        except BaseException as error:
            self._fail(error, operation.describe())
        finally:
            operation.let_go()
            self._log.complete(dropped=dropped)

    def _fail(self, error: BaseException, where: str) -> None:
        """Poison the log, whose operations are then dropped, so that everything is let go.

        Inline this is the engine's thread, whose interrupt goes on.
        """
        self._log.poison(error, where)
        if isinstance(error, KeyboardInterrupt) and not self._threaded:
            raise error
