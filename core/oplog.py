"""The ordered log: every movement of rows is an operation in it, carried out in order.

The log gives operations their sequence numbers, hands them to the one mover, counts completions,
and keeps the first failure. Order is what replaces versions, copy-on-write and joins: a read
appended before a write sees the old rows, one appended after it the new ones (H3).

One lock, the log lock, covers sequence, completion, poison and the page holds that callers wait
for. It is never held across a wait, a copy, an allocation or a backend call (T5).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from slotmirror.core.backend import DeviceBackend, Fence, HostRows, SlotIndex
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import CacheFailedError, WaitTimeoutError, without_tracebacks
from slotmirror.core.runtime import Runtime
from slotmirror.core.stats import CacheStats

logger = logging.getLogger("slotmirror.core")

_BACKLOG_MAX = 2


class Mover(Protocol):
    """What an operation may use while it is carried out."""

    backend: DeviceBackend
    """Whose scatter moves rows."""

    def gather(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        """`out[i] = pool[slots[i]]`, split among helper threads where that pays."""

    def wait_fence(self, fence: Fence) -> None:
        """Wait until a launched copy has run; without limit, reported when long (W6)."""


class Operation(ABC):
    """One entry of the log."""

    seq = 0
    """Position in the log, from 1; given by `append`."""
    urgent = True
    """Whether the mover is to be woken for it; otherwise by whoever comes to wait for it."""

    @abstractmethod
    def run(self, mover: Mover) -> None:
        """Carry it out, on the mover, without locks. Raising poisons the log (W5)."""

    def drop(self, mover: Mover) -> None:  # noqa: B027 - most operations have nothing to wait for
        """The log is poisoned: move nothing, but wait until no copy uses what is held."""

    def let_go(self) -> None:  # noqa: B027
        """Give back what is held; follows `run` or `drop`, once a failure has been recorded."""

    @abstractmethod
    def describe(self) -> str:
        """What it is, for reports: kind, step, rows."""

    def state(self) -> str:
        """How far it has come, for reports (W1); empty where it has no states."""
        return ""


class OpLog:
    """Sequence, completion, poison. Any thread."""

    def __init__(self, config: PrefixCacheConfig, runtime: Runtime, stats: CacheStats) -> None:
        self._timeouts_s = (config.staging_claim_timeout_s, config.device_wait_timeout_s)
        """How long a caller waits without progress, by `head_at_fence` (W6)."""
        self.runtime = runtime
        self.stats = stats
        self.lock = runtime.lock("log")
        self.changed = runtime.condition(self.lock)
        """For whoever changes, under it, what others wait for in `wait_until`."""
        self.unconsumed: Callable[[], list[int]] = list
        """Ids of unconsumed steps, for reports; whoever keeps the steps says where from."""
        self._work = runtime.condition(self.lock)
        self._queue: deque[Operation] = deque()
        self._recent: deque[str] = deque(maxlen=64)
        self._progress_at = runtime.monotonic()
        self._head: Operation | None = None
        self.head_at_fence = False
        """Whether the head operation waits for the device; set by the mover alone."""
        self._stopped = False
        self.failure: tuple[BaseException, str] | None = None
        """The first failure, without tracebacks, and where it happened."""

    # -- appending --------------------------------------------------------------------------

    def append(self, operations: Sequence[Operation]) -> None:
        """Append, all at once; neither blocks nor raises, poisoned or not.

        A poisoned log's mover drops them in order, so that whatever they hold is let go. Waking
        the mover costs the engine's thread more than the rest of the call: it is not woken for
        what nobody waits for yet, until more than `_BACKLOG_MAX` operations are queued.
        """
        with self.lock:
            stats, queue = self.stats, self._queue
            if not queue and self._head is None:
                self._progress_at = self.runtime.monotonic()
            queue.extend(operations)
            urgent = len(queue) > _BACKLOG_MAX
            for operation in operations:
                stats.operations_appended += 1
                operation.seq = stats.operations_appended
                urgent = urgent or operation.urgent
                self._recent.append(f"{operation.seq} {operation.describe()}")
            if urgent:
                self._work.notify_all()

    # -- the mover's side -------------------------------------------------------------------

    def take(self, *, block: bool) -> Operation | None:
        """The next operation, which becomes the head.

        None if there is none: with `block` only once the log was stopped and is drained. While
        another thread carries out the head, a caller without `block` gets None too.
        """
        with self.changed:
            while block and not self._queue and not self._stopped:
                self._work.wait()
            if not self._queue or self._head is not None:
                return None
            self._head = self._queue.popleft()
            return self._head

    def complete(self, *, dropped: bool) -> None:
        """The head operation is over; wakes waiters."""
        with self.changed:
            self._head = None
            self._progress_at = self.runtime.monotonic()
            self.stats.operations_completed += 1
            self.stats.operations_dropped += dropped
            self.changed.notify_all()

    def poison(self, cause: BaseException, where: str) -> None:
        """Record the first failure, then wake waiters; later ones are logged only (W5)."""
        without_tracebacks(cause)
        with self.changed:
            again = " again" if self.failure else ""
            if not again:
                self.failure = (cause, where)
                self.stats.failures += 1
            self.changed.notify_all()
        logger.error("failed%s in %s: %s: %s", again, where, type(cause).__name__, cause)

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there is one (W5)."""
        if self.failure is not None:
            raise CacheFailedError(*self.failure) from self.failure[0]

    # -- waiting ----------------------------------------------------------------------------

    def wake(self) -> None:
        """Let waiters look again, and the mover take what is queued."""
        with self.changed:
            self.changed.notify_all()
            if self._queue:
                self._work.notify_all()

    def is_completed(self, seq: int) -> Callable[[], bool]:
        """A condition for `wait_until`: operations up to `seq` are over."""
        return lambda: self.stats.operations_completed >= seq

    def is_drained(self) -> bool:
        """A condition for `wait_until`: nothing is queued or being carried out."""
        return self.stats.operations_completed == self.stats.operations_appended

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        *,
        through_failure: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until `ready()`, called under the log lock, is true.

        Bounded (W6): `timeout_s` in all if given; otherwise `staging_claim_timeout_s` without
        progress of the log, or `device_wait_timeout_s` while its head waits for the device.
        Raises `WaitTimeoutError` to this caller alone, which changes nothing, and the sticky
        failure unless `through_failure`.
        """
        with self.changed:
            started = self.runtime.monotonic()
            while True:
                if not through_failure:
                    self.raise_if_failed()
                if ready():
                    return
                since, limit = started, timeout_s
                if limit is None:
                    since = max(started, self._progress_at)
                    limit = self._timeouts_s[self.head_at_fence]
                left = since + limit - self.runtime.monotonic()
                if left <= 0:
                    break
                self._work.notify_all()
                self.changed.wait(left)
        raise WaitTimeoutError(f"gave up waiting for {what} after {limit:g} s; {self.report()}")

    def report(self) -> str:
        """What the head operation is and does, and the unconsumed step ids, for errors (W6)."""
        with self.changed:
            head, stats = self._head, self.stats
            position = f"{stats.operations_completed} of {stats.operations_appended} operations"
        position += f" completed; unconsumed step ids {self.unconsumed()}"
        if head is None:
            return f"the log is idle, {position}"
        doing = "waiting for the device" if self.head_at_fence else "moving rows"
        state = f"{head.describe()}; {head.state()}".removesuffix("; ")
        return f"head operation {head.seq} ({state}) is {doing}, {position}"

    # -- the end ----------------------------------------------------------------------------

    def stop(self) -> None:
        """Let the mover's blocking `take` return None once the queue is empty."""
        with self.changed:
            self._stopped = True
            self._work.notify_all()

    def tail(self) -> list[str]:
        """The last appended operations, oldest first, for reports."""
        with self.changed:
            return list(self._recent)

    def length_and_age_s(self) -> tuple[int, float]:
        """Operations not yet completed, and seconds since the last progress while there are any."""
        with self.changed:
            length = self.stats.operations_appended - self.stats.operations_completed
            return length, self.runtime.monotonic() - self._progress_at if length else 0.0
