"""Saved steps on their way from the engine to the builders."""

from __future__ import annotations

import random

from slotmirror.core.runtime import Runtime


class Inbox:
    """Step ids that wait for a builder; a builder takes any of them.

    A step that was refused (its turn has not come) is put back and offered again after the next
    progress.
    """

    def __init__(self, runtime: Runtime, rng: random.Random) -> None:
        self._changed = runtime.condition(runtime.lock("inbox"))
        self._rng = rng
        self._waiting: list[int] = []
        self._refused: list[int] = []
        self._taken: dict[int, int] = {}
        """Steps that builders are at work on, and the progress when they took them."""
        self._progress = 0
        self._abandoned = False
        self.closed = False
        """Whether the engine has ended; also without the lock."""

    def put(self, step_id: int) -> None:
        """A step was saved."""
        with self._changed:
            self._waiting.append(step_id)
            self._changed.notify_all()

    def put_back(self, step_id: int) -> None:
        """The step was refused for now; progress that was made meanwhile counts."""
        with self._changed:
            stale = self._taken.pop(step_id) != self._progress
            (self._waiting if stale else self._refused).append(step_id)
            self._changed.notify_all()

    def leave(self, step_id: int) -> None:
        """The builder that took the step does not go on; another may."""
        with self._changed:
            del self._taken[step_id]
            self._waiting.append(step_id)
            self._changed.notify_all()

    def done(self, step_id: int) -> None:
        """The step that was taken is consumed."""
        with self._changed:
            del self._taken[step_id]
            self._offer_again()

    def progress(self) -> None:
        """Something happened after which a refused step may be accepted."""
        with self._changed:
            self._offer_again()

    def drop(self, step_id: int) -> None:
        """The step that was taken will never be consumed."""
        self.done(step_id)

    def abandon(self) -> None:
        """A builder has failed: nobody takes anything any more."""
        with self._changed:
            self.closed = True
            self._abandoned = True
            self._changed.notify_all()

    def close(self) -> None:
        """No more steps will come."""
        with self._changed:
            self.closed = True
            self._offer_again()

    def take(self) -> int | None:
        """A step to consume; None when there will be no more.

        Steps that are still refused when the engine has ended and nobody is at work stay behind.
        """
        with self._changed:
            while self._abandoned or not self._waiting:
                if self._abandoned or (self.closed and not self._taken):
                    return None
                self._changed.wait()
            step_id = self._waiting.pop(self._rng.randrange(len(self._waiting)))
            self._taken[step_id] = self._progress
            return step_id

    def _offer_again(self) -> None:
        self._progress += 1
        self._waiting += self._refused
        self._refused.clear()
        self._changed.notify_all()
