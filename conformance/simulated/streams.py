"""Queues of device work, and fences in them.

Work is a small object with `ready` and `run`; a stream runs its head when it is stepped and the
head is ready. Work holds raw memory, never the tensors it came from: like a real device it does
not keep its caller's memory alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from slotmirror.conformance.simulated.faults import again
from slotmirror.core.backend import Fence, Stream

Run = Callable[[], None]


class DeviceState(Protocol):
    """What fences need to know of their device."""

    def check_alive(self) -> None:
        """Raise if the device is lost."""
        ...

    def fence_call(self, member: str) -> None:
        """A fence is used: schedule point, thread check, faults."""
        ...

    def fence_wait(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Hold the calling thread."""
        ...

    def violation(self, text: str) -> None:
        """Somebody broke the backend's contract."""
        ...


class SimulatedStream:
    """A queue; `append` is atomic, so finalisers may use it. One stepper at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        """The first failure of its work; every fence behind it reports it."""
        self.queue: deque[tuple[Run, Callable[[], bool] | None]] = deque()
        """Pieces of work that have not run, each with what it waits for."""

    def append(self, run: Run, ready: Callable[[], bool] | None = None) -> None:
        """Queue a piece of work; it is not run before `ready()`."""
        self.queue.append((run, ready))

    def head_can_run(self) -> bool:
        """Whether the head of a queue that is not empty can run now."""
        ready = self.queue[0][1]
        return ready is None or ready()

    def step(self) -> None:
        """Run the head, which must be ready."""
        run, _ = self.queue.popleft()
        try:
            run()
        except Exception as error:
            self.error = self.error or again(error)

    def __repr__(self) -> str:
        return f"stream {self.name} ({len(self.queue)} queued)"


class SimulatedFence(Fence):
    """Reached when the stream it was last recorded in gets there."""

    def __init__(self, device: DeviceState) -> None:
        self._device = device
        self._recorded = 0
        self._reached = 0
        self._error: BaseException | None = None

    def record(self, stream: Stream) -> None:
        self._device.fence_call("record")
        self.place(_simulated(stream))

    def place(self, stream: SimulatedStream) -> None:
        """Record without being a call of the core's own."""
        if self._reached < self._recorded:
            self._device.violation("a fence is recorded again before it was reached")
        self._recorded += 1
        number = self._recorded

        def reach() -> None:
            self._error = stream.error
            self._reached = max(self._reached, number)

        stream.append(reach)

    def wait_on(self, stream: Stream) -> None:
        self._device.fence_call("wait_on")
        self.hold_back(_simulated(stream))

    def hold_back(self, stream: SimulatedStream) -> None:
        """Let later work of `stream` wait for this fence."""
        number = self._recorded
        stream.append(_nothing, lambda: self._reached >= number)

    def done(self) -> bool:
        self._device.fence_call("done")
        return self._look()

    def wait(self, timeout_s: float) -> bool:
        self._device.fence_call("wait")
        if not self._look():
            self._device.fence_wait(self._is_over, timeout_s)
        return self._look()

    def _is_over(self) -> bool:
        """A lost device ends every wait, with an error."""
        if self._reached >= self._recorded:
            return True
        try:
            self._device.check_alive()
        except Exception:
            return True
        return False

    def _look(self) -> bool:
        self._device.check_alive()
        if self._reached < self._recorded:
            return False
        if self._error is not None:
            raise again(self._error)
        return True


def _nothing() -> None:
    pass


def _simulated(stream: Stream) -> SimulatedStream:
    if not isinstance(stream, SimulatedStream):
        raise TypeError(f"{stream!r} is not a stream of the simulated device")
    return stream
