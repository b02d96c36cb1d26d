"""The small interface behind which rows leave slotmirror, and the bounded queue before it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.errors import DeliveryTimeoutError, SinkFullError

WhenFull: TypeAlias = Literal["block", "drop", "fail"]


class Sink(ABC):
    """Where whole requests go; called by one thread, one request at a time."""

    @abstractmethod
    def write(self, request: RequestRows) -> None:
        """Take a request, whole or not at all.

        May block while the destination has no room, until `stop_waiting`. Raises `SinkFullError`
        or `OSError` if it could not be taken; it is then counted and handled as configured.
        """

    def stop_waiting(self) -> None:  # noqa: B027  # most sinks never wait
        """Another thread closes: a `write` that waits for room raises `SinkFullError` soon."""

    def close(self) -> None:  # noqa: B027  # most sinks hold nothing
        """No more requests come; twice is harmless."""


@dataclass(slots=True)
class SinkStats:
    """What became of whole requests; each counter is written by one thread."""

    requests_written: int = 0
    bytes_written: int = 0
    requests_dropped: int = 0
    full_waits: int = 0
    queue_bytes_high: int = 0


class SinkQueue:
    """Whole requests on their way to a sink, written by a thread of its own.

    bytes_max     bytes that may wait; one request is admitted into an empty queue at any size
    when_full     "block": `put` waits, `wait_s` at most; "drop": the request is dropped and
                  counted; "fail": `put` raises
    Lock: one condition; never held during a write.
    """

    def __init__(
        self, sink: Sink, *, bytes_max: int, when_full: WhenFull, wait_s: float, name: str
    ) -> None:
        self.stats = SinkStats()
        self._sink = sink
        self._bytes_max = bytes_max
        self._when_full = when_full
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._waiting: deque[RequestRows] = deque()
        self._bytes = 0
        self._closing = False
        self._failure: BaseException | None = None
        # A daemon: an engine that dies without a shutdown must not hang on a full sink.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, request: RequestRows) -> None:
        """Queue a request. Raises `SinkFullError` as configured, or what the sink failed with."""
        with self._changed:
            self._raise_failure()
            if not self._has_room(request) and self._when_full == "drop":
                self.stats.requests_dropped += 1
                return
            if not self._has_room(request):
                self._wait_for_room(request)
            self._waiting.append(request)
            self._bytes += request.num_bytes
            self.stats.queue_bytes_high = max(self.stats.queue_bytes_high, self._bytes)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until all is written. Raises `DeliveryTimeoutError`, or the sink's failure."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failed() or not self._bytes, timeout_s):
                raise DeliveryTimeoutError(
                    f"{self._bytes:,} B of {len(self._waiting)} requests are not written after "
                    f"{timeout_s} s: is the sink's consumer alive?"
                )
            self._raise_failure()

    def close(self, timeout_s: float) -> None:
        """Write what is queued within `timeout_s`, then end the thread and close the sink.

        Requests that are left are dropped and counted. Twice is harmless.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed() or not self._bytes, timeout_s)
            self._closing = True
            self._changed.notify_all()
        self._sink.stop_waiting()
        self._thread.join()
        self._sink.close()

    def _wait_for_room(self, request: RequestRows) -> None:
        """Caller holds the condition."""
        self.stats.full_waits += 1
        wait_s = self._wait_s if self._when_full == "block" else 0.0
        room = self._changed.wait_for(lambda: self._failed() or self._has_room(request), wait_s)
        self._raise_failure()
        if not room:
            raise SinkFullError(
                f"the sink's queue holds {self._bytes:,} B and took nothing for {wait_s} s: raise "
                f"queue_bytes_max ({self._bytes_max:,}), speed up the consumer, or set "
                f"when_full (now {self._when_full!r}) to 'drop'"
            )

    def _has_room(self, request: RequestRows) -> bool:
        return not self._bytes or self._bytes + request.num_bytes <= self._bytes_max

    def _failed(self) -> bool:
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise SinkFullError(
                f"the sink failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting or (self._closing and self._failed()):
                    self.stats.requests_dropped += len(self._waiting)
                    return
                request = self._waiting.popleft()
            self._write(request)

    def _write(self, request: RequestRows) -> None:
        try:
            self._sink.write(request)
        except BaseException as error:  # a callback can raise anything; it must not end the thread
            self._note_failed_write(error)
        else:
            self.stats.requests_written += 1
            self.stats.bytes_written += request.num_bytes
        finally:
            with self._changed:
                self._bytes -= request.num_bytes
                self._changed.notify_all()

    def _note_failed_write(self, error: BaseException) -> None:
        self.stats.requests_dropped += 1
        full = isinstance(error, SinkFullError | OSError)
        if full and (self._when_full == "drop" or self._closing):
            return
        with self._changed:
            self._failure = self._failure or error
