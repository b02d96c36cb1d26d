"""Fences over torch events, with bounded waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slotmirror.backends.torch_device.capture_mode import RelaxedCapture
from slotmirror.backends.torch_device.device_api import DeviceEvent
from slotmirror.core.backend import Fence, Stream
from slotmirror.core.errors import InternalError

_PAUSE_MIN_S = 0.0001
_PAUSE_MAX_S = 0.002


@dataclass(frozen=True, slots=True)
class PolledWait:
    """Waits by asking, with pauses that grow from 0.1 ms to 2 ms; `timeout_s` is kept exactly.

    `Event.synchronize`, of a blocking event too, has no time limit: a lost device would hold the
    committer, and with it the shutdown, for ever. Polling needs no second thread to be bounded.
    A copy behind a forward of 20 ms is asked for about 15 times and noticed at most 2 ms late;
    each query takes the GIL for microseconds.
    """

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `reached()` came true within `timeout_s` seconds."""
        deadline = self.monotonic() + timeout_s
        pause = _PAUSE_MIN_S
        while not reached():
            left = deadline - self.monotonic()
            if left <= 0:
                return False
            self.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_MAX_S)
        return True


class _Recording:
    """One use of a fence, and what the work before it reads."""

    __slots__ = ("kept", "reached")

    def __init__(self, kept: list[torch.Tensor]) -> None:
        self.kept = kept
        self.reached = False


class EventFence(Fence):
    """One event for life. Any thread; the owner records, waiters may ask at the same time."""

    def __init__(self, event: DeviceEvent, relaxed: RelaxedCapture, wait: PolledWait) -> None:
        self._event = event
        self._relaxed = relaxed
        self._wait = wait
        self._recording: _Recording | None = None
        self._kept: list[torch.Tensor] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold `tensor` until the next recording of this fence has been reached."""
        self._kept.append(tensor)

    def record(self, stream: Stream) -> None:
        """See `Fence`. Raises `InternalError` while an earlier recording is still ahead.

        Whoever waited for the earlier one would otherwise wait for the later.
        """
        if not self.done():
            raise InternalError("a fence is recorded again before it was reached")
        self._event.record(stream)
        kept, self._kept = self._kept, []
        self._recording = _Recording(kept)

    def wait_on(self, stream: Stream) -> None:
        if self._recording is not None:
            self._event.wait(stream)

    def done(self) -> bool:
        # A waiter may still be in here when the owner, who has seen the end, records anew: each
        # call speaks of the recording that it found.
        recording = self._recording
        if recording is None or recording.reached:
            return True
        with self._relaxed():
            recording.reached = self._event.query()
        if recording.reached:
            recording.kept = []
        return recording.reached

    def wait(self, timeout_s: float) -> bool:
        return self._wait.until(self.done, timeout_s)
