"""The whole cache on the backend: golden traces, and what it does when the backend fails."""

from __future__ import annotations

import functools

import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.conformance.backend_suite.check import (
    CheckFailed,
    checks_of,
    refuses,
    require,
    require_bytes,
)
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench
from slotmirror.conformance.golden.check import play
from slotmirror.conformance.golden.player import Mode
from slotmirror.conformance.golden.recording import Recording, read_recordings
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import CacheFailedError, GatherFailedError
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy

_TRACES = ("seed 21", "seed 24", "seed 40")
"""Of the shipped ones: blocks of 1, 4 and 2 slots. `slotmirror golden check` plays them all."""

_FIRST_ROWS = torch.arange(8.0).view(4, 2)


def golden_traces_match_with_a_mover_thread(bench: Workbench) -> None:
    """Hits, recycled blocks, deferred keys: every delivered byte is the reference's."""
    _compare(bench, Mode("threaded"))


def golden_traces_match_inline(bench: Workbench) -> None:
    """The same without a thread: operations run where they are appended."""
    _compare(bench, Mode("inline"))


def golden_traces_match_with_direct_capture(bench: Workbench) -> None:
    """The same with copies straight into the pool, where it is page-locked."""
    if bench.backend.capabilities.pinned_host:
        _compare(bench, Mode("threaded", direct=True))


def golden_traces_match_on_the_device(bench: Workbench) -> None:
    """The same with outputs on the consumer's device, where copies to it are declared."""
    if bench.backend.capabilities.device_copies:
        _compare(bench, Mode("threaded", device=True))


def a_failed_copy_fails_the_cache_and_nothing_else(bench: Workbench) -> None:
    """A launch that fails is reported, sticky, and the shutdown still ends."""
    _fail(bench, "copy_to_host")
    with _shut_down_after(bench) as cache, refuses(CacheFailedError, "a save whose copy failed"):
        _save_one_step(bench, cache)


def a_failed_write_fails_the_cache_and_nothing_else(bench: Workbench) -> None:
    """A scatter that fails is the cache's first cause."""
    _fail(bench, "scatter_slots")
    with _shut_down_after(bench) as cache, refuses(CacheFailedError, "a pool write that failed"):
        _save_one_step(bench, cache)
        cache.quiesce(WAIT_S)


def a_failed_read_fails_its_step_alone(bench: Workbench) -> None:
    """A gather that fails is reported by its step; the next step has all rows."""
    with _shut_down_after(bench) as cache:
        tables = _save_one_step(bench, cache)
        _fail(bench, "gather_slots")
        hit = AdmittedRequest("hit", 4, (0, 1))
        step_id = _save_hit(bench, cache, tables, hit)
        with refuses(GatherFailedError, "a pool read that failed"):
            cache.materialize(step_id)
        cache.discard_step(step_id)
        again = _save_hit(bench, cache, tables, AdmittedRequest("again", 4, (0, 2)))
        hidden = cache.materialize(again).hidden_states
        require(hidden is not None and len(hidden["again"]) == 5, "rows are lost with a read")


def a_failed_allocation_changes_nothing(bench: Workbench) -> None:
    """A save that gets no memory may be repeated, and then delivers every row (C3)."""
    _repeat_after_failure(bench, "alloc_host")


def a_failed_snapshot_changes_nothing(bench: Workbench) -> None:
    """The same where the device cannot clone; the core takes clones for asynchronous copies."""
    if bench.backend.capabilities.async_copy:
        _repeat_after_failure(bench, "snapshot")


@functools.cache
def _recordings() -> tuple[Recording, ...]:
    return tuple(one for one in read_recordings() if one.name in _TRACES)


def _compare(bench: Workbench, mode: Mode) -> None:
    for recording in _recordings():
        for found in play(recording, bench, mode):
            raise CheckFailed(f"golden trace {found.trace}, step {found.step}: {found.reason}")


def _fail(bench: Workbench, member: str) -> None:
    """Let the next call of the backend's member fail."""
    bench.failures()[member]()


class _shut_down_after:  # noqa: N801 - reads as what it does
    """A small inline cache on the bench's backend, shut down at the end, errors or not."""

    def __init__(self, bench: Workbench) -> None:
        config = PrefixCacheConfig(
            num_blocks=8, block_size=4, staging_capacity_tokens=16, committer="inline"
        )
        self._cache = PrefixCacheManager(config, bench.backend)
        self._cache.register_policy(ModelCachePolicy())

    def __enter__(self) -> PrefixCacheManager:
        return self._cache

    def __exit__(self, *_: object) -> None:
        self._cache.shutdown()


def _repeat_after_failure(bench: Workbench, member: str) -> None:
    with _shut_down_after(bench) as cache:
        _start_one_step(cache)
        _fail(bench, member)
        hidden = bench.tensor(_FIRST_ROWS)
        with refuses(Exception, f"a save whose {member} failed"):
            cache.save_outputs(hidden, {}, num_tokens_unpadded=4)
        delivered = cache.materialize(cache.save_outputs(hidden, {}, num_tokens_unpadded=4))
        rows = delivered.hidden_states
        require(rows is not None, "a repeated save delivers no hidden states")
        if rows is not None:
            require_bytes(rows["first"], _FIRST_ROWS, "the rows of a repeated save")


def _start_one_step(cache: PrefixCacheManager) -> BlockTables:
    """A first request of four tokens starts."""
    tables = BlockTables(num_blocks=8, block_size=4)
    cache.new_step_starts(
        tables.step(
            num_scheduled_tokens={"first": 4},
            num_computed_tokens={"first": 0},
            new=[AdmittedRequest("first", 0, (0,))],
        )
    )
    return tables


def _save_one_step(bench: Workbench, cache: PrefixCacheManager) -> BlockTables:
    """Its four rows, saved and consumed."""
    tables = _start_one_step(cache)
    hidden = bench.tensor(_FIRST_ROWS)
    cache.materialize(cache.save_outputs(hidden, {}, num_tokens_unpadded=4))
    return tables


def _save_hit(
    bench: Workbench, cache: PrefixCacheManager, tables: BlockTables, request: AdmittedRequest
) -> int:
    """One more row of a request that hits the first block."""
    events = tables.step(
        num_scheduled_tokens={request.req_id: 1},
        num_computed_tokens={request.req_id: 4},
        new=[request],
    )
    cache.new_step_starts(events)
    return cache.save_outputs(bench.tensor(torch.zeros(1, 2)), {}, num_tokens_unpadded=1)


CACHE_CHECKS = checks_of(
    golden_traces_match_with_a_mover_thread,
    golden_traces_match_inline,
    golden_traces_match_with_direct_capture,
    golden_traces_match_on_the_device,
    a_failed_allocation_changes_nothing,
    a_failed_snapshot_changes_nothing,
    a_failed_copy_fails_the_cache_and_nothing_else,
    a_failed_write_fails_the_cache_and_nothing_else,
    a_failed_read_fails_its_step_alone,
)
