"""`gather_slots` and `scatter_slots` against the reference, byte for byte."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.backend_suite.check import checks_of, require
from slotmirror.conformance.backend_suite.values import DTYPES, WIDTHS_BYTES, random_rows
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.core.backend import HostRows, SlotIndex
from slotmirror.core.host_rows import as_host_rows

_SLOTS = 97
_MOVED = 64


def gathered_rows_match_the_reference(bench: Workbench) -> None:
    """Every width of a row, every dtype's patterns, in any order, slots more than once."""
    reference = CpuRefBackend()
    for number, (pool, _) in enumerate(_pools()):
        slots = _slots(number, duplicates=True)
        got, expected = _empty(_MOVED, pool), _empty(_MOVED, pool)
        before = pool.copy()
        bench.backend.gather_slots(pool, slots, got)
        reference.gather_slots(pool, slots, expected)
        require(_same(got, expected), f"gathered rows of {pool.itemsize} bytes differ")
        require(_same(pool, before), f"a gather of {pool.itemsize}-byte rows changed the pool")


def scattered_rows_match_the_reference(bench: Workbench) -> None:
    """The same for writes; rows that are not written keep their bytes."""
    reference = CpuRefBackend()
    for number, (pool, rows) in enumerate(_pools()):
        slots = _slots(number, duplicates=False)
        got, expected = pool.copy(), pool.copy()
        bench.backend.scatter_slots(got, slots, rows)
        reference.scatter_slots(expected, slots, rows)
        require(_same(got, expected), f"scattered rows of {pool.itemsize} bytes differ")


def the_last_of_duplicate_slots_stays(bench: Workbench) -> None:
    """A slot that is written twice in one call has the later row (H4)."""
    for number, (pool, rows) in enumerate(_pools()):
        slots = _slots(number, duplicates=True)
        expected = pool.copy()
        for slot, row in zip(slots.tolist(), rows, strict=True):
            expected[slot] = row
        bench.backend.scatter_slots(pool, slots, rows)
        require(_same(pool, expected), f"duplicates of {pool.itemsize}-byte rows: not the last")


def no_rows_are_no_work(bench: Workbench) -> None:
    """Empty index lists change nothing and do not raise."""
    nothing = np.empty(0, dtype=np.int64)
    for pool, _ in _pools():
        before = pool.copy()
        bench.backend.gather_slots(pool, nothing, _empty(0, pool))
        bench.backend.scatter_slots(pool, nothing, _empty(0, pool))
        require(_same(pool, before), "moving no rows changed the pool")


def slots_out_of_range_reach_no_other_memory(bench: Workbench) -> None:
    """The core checks slots; a bug of its own must still not write beside the pool."""
    for pool, rows in _pools():
        guarded = np.concatenate((pool, pool, pool))
        inner, before = guarded[_SLOTS : 2 * _SLOTS], guarded.copy()
        slots = np.full(_MOVED, _SLOTS + 3, dtype=np.int64)
        with suppress(IndexError, ValueError, RuntimeError):
            bench.backend.scatter_slots(inner, slots, rows)
        outside = np.r_[0:_SLOTS, 2 * _SLOTS : 3 * _SLOTS]
        require(_same(guarded[outside], before[outside]), "a write went beside the pool")


def rows_of_a_large_pool_move_whole(bench: Workbench) -> None:
    """Slots beyond the first megabytes, in one large operation."""
    pool = as_host_rows(random_rows((5000, 2048), torch.bfloat16, seed=40))
    slots = np.random.default_rng(41).permutation(5000).astype(np.int64)
    got = _empty(5000, pool)
    bench.backend.gather_slots(pool, slots, got)
    require(_same(got, pool[slots]), "a large gather differs")
    back = _empty(5000, pool)
    bench.backend.scatter_slots(back, slots, got)
    require(_same(back, pool), "a large scatter differs")


def _pools() -> list[tuple[HostRows, HostRows]]:
    """Pools of `_SLOTS` rows, one per width and dtype, and `_MOVED` rows to write."""
    layouts = [((width,), torch.uint8) for width in WIDTHS_BYTES]
    layouts += [((3,), dtype) for dtype in DTYPES]
    return [
        (
            as_host_rows(random_rows((_SLOTS, *width), dtype, seed=50 + number)),
            as_host_rows(random_rows((_MOVED, *width), dtype, seed=90 + number)),
        )
        for number, (width, dtype) in enumerate(layouts)
    ]


def _slots(seed: int, *, duplicates: bool) -> SlotIndex:
    rng = np.random.default_rng(seed)
    if not duplicates:
        return rng.permutation(_SLOTS)[:_MOVED].astype(np.int64)
    slots = rng.integers(0, _SLOTS // 4, _MOVED)
    slots[:2] = (0, _SLOTS - 1)
    return slots.astype(np.int64)


def _empty(count: int, like: HostRows) -> HostRows:
    return np.zeros(count, dtype=like.dtype)


def _same(a: HostRows, b: HostRows) -> bool:
    return a.tobytes() == b.tobytes()


SLOT_CHECKS = checks_of(
    gathered_rows_match_the_reference,
    scattered_rows_match_the_reference,
    the_last_of_duplicate_slots_stays,
    no_rows_are_no_work,
    slots_out_of_range_reach_no_other_memory,
    rows_of_a_large_pool_move_whole,
)
