"""The device behind the stand-in modules: queues, virtual time, and who did what it must not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from support.stand_in.queues import Memory, PinnedMemory, Queue

DEVICES = 2
POOLED_STREAMS = 32
_QUERY_S = 1e-5
_WORK_PER_SLEEP_MAX = 16


class StandInStream:
    """A stream of one family on one device."""

    def __init__(self, owner: StandInDevice, family: str, index: int, queue: Queue):
        self.owner = owner
        self.family = family
        self.index = index
        self.queue = queue

    def wait_stream(self, stream: StandInStream) -> None:
        event = StandInEvent(self.owner, self.family)
        event.record(stream)
        event.wait(self)

    def is_capturing(self) -> bool:
        return self.owner.capturing is self.queue


class StandInEvent:
    """An event of one family; belongs to the device that it was first recorded on."""

    def __init__(self, owner: StandInDevice, family: str) -> None:
        self._owner = owner
        self._family = family
        self._index: int | None = None
        self._recorded = 0
        self._reached = 0

    def record(self, stream: StandInStream) -> None:
        self._owner.check_use(stream, self._family)
        if self._index not in (None, stream.index):
            raise RuntimeError(f"event of device {self._index} recorded on device {stream.index}")
        self._index = stream.index
        self._recorded += 1
        number = self._recorded

        def reach() -> None:
            self._reached = max(self._reached, number)

        self._owner.enqueue(stream.queue, reach)

    def wait(self, stream: StandInStream) -> None:
        self._owner.check_use(stream, self._family)
        number = self._recorded
        stream.queue.append(lambda: None, lambda: self._reached >= number)

    def query(self) -> bool:
        self._owner.check_query()
        self._owner.pass_time(_QUERY_S)
        return self._reached >= self._recorded


class StandInDevice:
    """All devices of one stand-in process. Time passes only when somebody asks or sleeps."""

    def __init__(self, seed: int = 0) -> None:
        self.memory = Memory()
        self.now_s = 0.0
        self.capturing: Queue | None = None
        self.capture_mode = "global"
        self.pinned_bytes_max = 1 << 40
        self.pinned = PinnedMemory()
        self.streams_made = 0
        self.synchronous_copies = 0
        self.queries_relaxed = 0
        self.lost: RuntimeError | None = None
        self.fail_next_copy = False
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._defaults = [Queue(f"default of device {i}") for i in range(DEVICES)]
        self._queues = list(self._defaults)
        self._streams: dict[tuple[str, int], list[StandInStream]] = {}

    # -- per thread ---------------------------------------------------------------------------

    @property
    def current_index(self) -> int:
        """A new thread sits on device 0."""
        return getattr(self._thread, "index", 0)

    @current_index.setter
    def current_index(self, index: int) -> None:
        self._thread.index = index

    def current(self, family: str, index: int | None = None) -> StandInStream:
        """The calling thread's stream on a device, its default stream at first."""
        index = self.current_index if index is None else index
        queue = getattr(self._thread, "queues", {}).get(index, self._defaults[index])
        return StandInStream(self, family, index, queue)

    @contextmanager
    def using(self, stream: StandInStream):
        former = dict(getattr(self._thread, "queues", {}))
        self._thread.queues = {**former, stream.index: stream.queue}
        try:
            yield
        finally:
            self._thread.queues = former

    def set_current(self, stream: StandInStream) -> None:
        self._thread.queues = {**getattr(self._thread, "queues", {}), stream.index: stream.queue}
        self.current_index = stream.index

    @contextmanager
    def relaxed(self):
        former = getattr(self._thread, "relaxed", False)
        self._thread.relaxed = True
        try:
            yield
        finally:
            self._thread.relaxed = former

    def enter_once(self, mode_class) -> None:
        """Let the calling thread's operations be taken, from now to its end."""
        if not getattr(self._thread, "taken", False):
            self._thread.taken = True
            mode_class(self).__enter__()

    # -- streams ------------------------------------------------------------------------------

    def pooled_stream(self, family: str, index: int) -> StandInStream:
        """One of 32, in turn."""
        pool = self._streams.setdefault((family, index), [])
        self.streams_made += 1
        if len(pool) < POOLED_STREAMS:
            queue = Queue(f"{len(pool)} of device {index}")
            self._queues.append(queue)
            pool.append(StandInStream(self, family, index, queue))
            return pool[-1]
        return pool[(self.streams_made - 1) % POOLED_STREAMS]

    def check_use(self, stream: StandInStream, family: str) -> None:
        """A thread works on the device that it has set, with streams and events of one family."""
        self.check_alive()
        if stream.family != family:
            raise TypeError(f"a {family} event and a {stream.family} stream")
        if stream.index != self.current_index:
            raise RuntimeError(
                f"stream of device {stream.index}, thread on device {self.current_index}"
            )

    def enqueue(self, queue: Queue, run: Callable[[], None]) -> None:
        """Queue work that torch must not see as operations of the program."""

        def unseen() -> None:
            with _disable_current_modes(), torch.no_grad():
                run()

        if self.capturing is queue:
            raise RuntimeError("work was captured into a graph")
        queue.append(unseen)

    # -- time ---------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Virtual time passes for the device, which does several pieces of work in it."""
        self.pass_time(seconds, self._rng.randrange(1, _WORK_PER_SLEEP_MAX + 1))

    def pass_time(self, seconds: float, work: int = 1) -> None:
        """The device does some pieces of work, in an order drawn from the seed."""
        with self._lock:
            self.now_s += seconds
            for _ in range(work):
                self._step()

    def finish(self, queue: Queue) -> None:
        """Hold the thread until the queue is empty, as a synchronous call does."""
        with self._lock:
            while queue:
                self.now_s += _QUERY_S
                self._step()

    def _step(self) -> None:
        ready = [queue for queue in self._queues if queue.steppable]
        if ready:
            self._rng.choice(ready).step()

    def keep_busy(self, queue: Queue, seconds: float) -> None:
        """Work of this length, in virtual time, from when the queue gets to it."""
        started: list[float] = []

        def is_over() -> bool:
            if not started:
                started.append(self.now_s)
            return self.now_s >= started[0] + seconds

        queue.append(lambda: None, is_over)

    # -- what a capture forbids, and the end ----------------------------------------------------

    def check_query(self) -> None:
        """A query by a thread that is not relaxed breaks a capture in the global mode."""
        self.check_alive()
        relaxed = getattr(self._thread, "relaxed", False)
        self.queries_relaxed += relaxed
        if self.capturing is not None and self.capture_mode == "global" and not relaxed:
            raise RuntimeError("an event query broke a capture of another thread")

    def check_alive(self) -> None:
        if self.lost is not None:
            raise self.lost

    # -- host memory --------------------------------------------------------------------------

    def allow_pinning(self, num_bytes: int) -> None:
        """Raises as the driver does where there is no more to be page-locked."""
        self.check_query()
        if self.pinned.num_bytes + num_bytes > self.pinned_bytes_max:
            raise RuntimeError("out of page-locked memory")
