"""A shutdown that waits for somebody goes on as soon as that one is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.block_tables import BlockTables
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.open_keys import OpenKeys
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.staging import StagingPage
from support.caches import rows

_BOUND_S = 60.0


def saved_step() -> tuple[PrefixCacheManager, int]:
    """A cache on real threads with one saved step, whose rows are in the pool already."""
    config = PrefixCacheConfig(num_blocks=8, block_size=4, device_wait_timeout_s=_BOUND_S)
    cache = PrefixCacheManager(config, CpuRefBackend())
    cache.register_policy(ModelCachePolicy())
    cache.new_step_starts(
        BlockTables(num_blocks=8, block_size=4).step(
            new=[AdmittedRequest("a", 0, (0,))],
            num_scheduled_tokens={"a": 2},
            num_computed_tokens={"a": 0},
        )
    )
    step_id = cache.save_outputs(rows(0, 2), {}, num_tokens_unpadded=2)
    cache.quiesce(_BOUND_S)
    return cache, step_id


def test_S3_a_shutdown_ends_with_the_last_consumer_and_not_with_its_bound() -> None:
    """It looks once more when the page has come back, the step still counts as busy, and the
    consumer then finishes without touching the log: the shutdown must hear of that."""
    cache, step_id = saved_step()
    close, let_go = cache._plane.close, cache._plane.ring.let_go
    looks = threading.Semaphore(0)

    def close_and_tell(keys: OpenKeys, busy_consumers: Callable[[], int]) -> None:
        def look() -> int:
            busy = busy_consumers()
            looks.release()
            return busy

        close(keys, look)

    shutting_down = threading.Thread(target=cache.shutdown)

    def let_go_before_a_shutdown_looks(page: StagingPage) -> None:
        shutting_down.start()
        assert looks.acquire(timeout=_BOUND_S)
        let_go(page)
        assert looks.acquire(timeout=_BOUND_S)

    cache._plane.close = close_and_tell  # type: ignore[method-assign]
    cache._plane.ring.let_go = let_go_before_a_shutdown_looks  # type: ignore[method-assign]
    cache.materialize(step_id)
    shutting_down.join(_BOUND_S / 4)
    assert not shutting_down.is_alive()
    assert sum(cache.memory_stats().values()) == 0
