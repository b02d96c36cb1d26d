"""The plain model for real threads: each of its calls is one step, as on the explorer's actors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from slotmirror.conformance.traces.plain_model import PlainModel

R = TypeVar("R")

_CALLS = (
    "count", "mark", "start", "reset", "save", "begin", "refused", "consumed", "unverified",
    "may_wait_for", "must_wait_for", "may_miss", "must_miss", "expected",
)  # fmt: skip


class SharedModel(PlainModel):
    """Its lock is held within one call of the model, never while the cache is called."""

    def __init__(self, needs_hidden: bool) -> None:
        super().__init__(needs_hidden)
        self.lock = threading.Lock()


def _under_lock(call: Callable[..., R]) -> Callable[..., R]:
    @wraps(call)
    def locked(self: SharedModel, *arguments: object) -> R:
        with self.lock:
            return call(self, *arguments)

    return locked


for _name in _CALLS:
    setattr(SharedModel, _name, _under_lock(getattr(PlainModel, _name)))
