"""A shutdown that waits for a consumer or a save goes on as soon as that one is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import MissingRowsError
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy
from support.caches import rows

_BOUND_S = 60.0
_SOON_S = 10.0


class WatchedShutdown:
    """A cache on real threads with one saved step, and a shutdown that tells when it looks.

    It looks, whenever it is woken and the log is drained, whether a consumer or a save is busy.
    """

    def __init__(self, computed: int, committer: str = "threaded") -> None:
        """The step's request claims a hit of `computed` tokens, of which no row is there."""
        config = PrefixCacheConfig(
            num_blocks=8, block_size=4, device_wait_timeout_s=_BOUND_S, committer=committer
        )
        self.cache = PrefixCacheManager(config, CpuRefBackend())
        self.cache.register_policy(ModelCachePolicy())
        self._tables = BlockTables(num_blocks=8, block_size=4)
        self.start("a", computed, (0, 1))
        self.step_id = self.save()
        self.cache.quiesce(_SOON_S)
        self._looks = threading.Semaphore(0)
        self._busy = 0
        self._close = self.cache._plane.close
        self.cache._plane.close = self._watched  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.cache.shutdown, daemon=True)

    def start(self, name: str, computed: int, blocks: tuple[int, ...]) -> None:
        """Start a step of one new request with two tokens."""
        self.cache.new_step_starts(
            self._tables.step(
                new=[AdmittedRequest(name, computed, blocks)],
                num_scheduled_tokens={name: 2},
                num_computed_tokens={name: computed},
            )
        )

    def save(self) -> int:
        """Save the open step."""
        return self.cache.save_outputs(rows(0, 2), {}, num_tokens_unpadded=2)

    def _watched(self, busy_consumers: Callable[[], int]) -> bool:
        def look() -> int:
            busy = self._busy = busy_consumers()
            self._looks.release()
            return busy

        return self._close(look)

    def begin(self) -> None:
        """Start to shut down; returns when it has looked for the first time, and has to wait."""
        self._thread.start()
        self.has_looked()
        assert self._busy == 1

    def has_looked(self) -> None:
        """Wait until it has looked once more."""
        assert self._looks.acquire(timeout=_SOON_S)

    def ends_soon(self) -> bool:
        """Whether it ends long before its bound."""
        self._thread.join(_SOON_S)
        return not self._thread.is_alive()


def test_S3_a_shutdown_ends_with_the_last_consumer_and_not_with_its_bound() -> None:
    """It looks when the page has come back, and the step still counts as busy: the consumer then
    finishes without touching the log, of which the shutdown must hear."""
    shutdown = WatchedShutdown(computed=0)
    cache, let_go = shutdown.cache, shutdown.cache._plane.ring.let_go

    def let_go_during_the_shutdown(*arguments: Any) -> None:
        shutdown.begin()
        let_go(*arguments)
        shutdown.has_looked()

    cache._plane.ring.let_go = let_go_during_the_shutdown  # type: ignore[method-assign]
    cache.materialize(shutdown.step_id)
    assert shutdown.ends_soon()
    assert sum(cache.memory_stats().values()) == 0


@pytest.mark.parametrize("committer", ["threaded", "inline"])
def test_S3_a_shutdown_ends_with_the_last_consumer_that_fails(committer: str) -> None:
    """The mover may have released the given-up page before the step stops counting as busy; where
    the consumer is the mover, it releases the page itself, afterwards."""
    shutdown = WatchedShutdown(computed=4, committer=committer)
    cache = shutdown.cache
    await_rows, drop = cache._plane.await_rows, cache._tables.steps.drop

    def await_rows_during_the_shutdown(*arguments: Any) -> None:
        shutdown.begin()
        await_rows(*arguments)

    def drop_late(*arguments: Any) -> None:
        if committer == "threaded":
            shutdown.has_looked()
        drop(*arguments)

    cache._plane.await_rows = await_rows_during_the_shutdown  # type: ignore[method-assign]
    cache._tables.steps.drop = drop_late  # type: ignore[method-assign]
    with pytest.raises(MissingRowsError):
        cache.materialize(shutdown.step_id)
    assert shutdown.ends_soon()
    assert sum(cache.memory_stats().values()) == 0


def test_S3_a_shutdown_ends_with_the_save_that_it_waits_for() -> None:
    """A save that fails before it has appended anything tells the log all the same."""
    shutdown = WatchedShutdown(computed=0)
    cache = shutdown.cache
    shutdown.start("b", 0, (2,))

    def stage_during_the_shutdown(*_: Any) -> None:
        shutdown.begin()
        raise MemoryError("no page memory")

    cache._plane.ring.stage = stage_during_the_shutdown  # type: ignore[method-assign, assignment]
    with pytest.raises(MemoryError):
        shutdown.save()
    assert shutdown.ends_soon()
    assert cache.stats()["steps_abandoned"] == 1
    assert sum(cache.memory_stats().values()) == 0
