"""Threads for actors, used again by the next run: starting one costs more than a short actor."""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Worker:
    """One thread that carries out a job whenever it is given one."""

    def __init__(self) -> None:
        self._wake = threading.Lock()
        self._wake.acquire()
        self._job: Callable[[], None] | None = None
        threading.Thread(target=self._main, name="explorer-worker", daemon=True).start()

    def give(self, job: Callable[[], None]) -> None:
        self._job = job
        self._wake.release()

    def _main(self) -> None:
        while True:
            self._wake.acquire()
            if self._job is not None:
                self._job()
            self._job = None
            _idle.append(self)


_idle: list[_Worker] = []


def run_in_thread(job: Callable[[], None]) -> None:
    """Carry out `job`, which must not raise, on an idle thread or a new one."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.give(job)
