"""The builder thread of one stage: turns saved steps into per-request outputs, in order.

`materialize` waits for copies and gathers; on its own thread the engine goes on with the next
step meanwhile (stage-cache spec, T1 and T2).
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from slotmirror.engine.errors import EngineError

Job = TypeVar("Job")


class OutputBuilder(Generic[Job]):
    """Runs `build(job)` for every submitted job, one after the other, on one thread.

    The thread starts with the first job. After a failure the remaining jobs go to `discard`
    instead, so that they hold no staging page, and every later `submit` and `wait_done` raises
    `EngineError` with the first failure as its cause. Engine thread only.
    """

    def __init__(
        self,
        name: str,
        *,
        build: Callable[[Job], None],
        discard: Callable[[Job], None],
        queue_length_max: int,
        wait_timeout_s: float,
    ) -> None:
        self._name = name
        self._build = build
        self._discard = discard
        self._queue_length_max = queue_length_max
        self._wait_timeout_s = wait_timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._num_submitted = 0
        self._num_done = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> int:
        """Queue `job` and return its number, from 1; waits while the queue is full (bounded)."""
        with self._changed:
            if self._closing:
                raise EngineError(f"the output builder of stage {self._name!r} is closed")
            self._wait(lambda: len(self._jobs) < self._queue_length_max, "room in the queue")
            self._jobs.append(job)
            self._num_submitted += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"slotmirror-builder-{self._name}", daemon=True
                )
                self._thread.start()
            return self._num_submitted

    def wait_done(self, job_number: int) -> None:
        """Wait (bounded) until the jobs up to `job_number` have been built."""
        with self._changed:
            self._wait(lambda: self._num_done >= job_number, f"job {job_number}")

    def close(self) -> None:
        """Build or discard what is queued and join the thread; twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._wait_timeout_s)
            if self._thread.is_alive():
                raise EngineError(
                    f"the output builder of stage {self._name!r} is still in job "
                    f"{self._num_done + 1} after {self._wait_timeout_s} s"
                )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Caller holds the lock; returns when `condition` holds, raises the worker's failure."""
        met = self._changed.wait_for(
            lambda: self._failure is not None or condition(), self._wait_timeout_s
        )
        if self._failure is not None:
            raise EngineError(
                f"stage {self._name!r} could not build its outputs: "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        if not met:
            raise EngineError(
                f"stage {self._name!r} waited {self._wait_timeout_s} s for {what} of its output "
                f"builder: {self._num_done} of {self._num_submitted} jobs are done"
            )

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            failure = self._attempt(self._build if self._failure is None else self._discard, job)
            with self._changed:
                self._failure = self._failure or failure
                self._num_done += 1
                self._changed.notify_all()

    def _next_job(self) -> Job | None:
        """The oldest job; waits for one, None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closing)
            if not self._jobs:
                return None
            self._changed.notify_all()
            return self._jobs.popleft()

    @staticmethod
    def _attempt(work: Callable[[Job], None], job: Job) -> BaseException | None:
        try:
            work(job)
        except BaseException as error:
            return error
        return None
