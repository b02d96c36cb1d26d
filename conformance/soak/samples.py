"""What a soak measures at rest, and what it calls flat."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slotmirror.core.manager import PrefixCacheManager

RESIDENT_GROWTH_BYTES_MAX = 8 << 20
"""Growth of the resident set that half a soak may show: allocators settle slowly."""

OBJECTS_PER_ROUND_MAX = 5.0
"""Python objects that a cache may keep per round; one that leaks with every step is many more."""

OBJECTS_PER_CACHE_MAX = 10.0
"""Python objects that may be left when a cache has ended; a manager alone is many more."""

WARM_UP_ROUNDS = 5
"""Rounds after which a cache has met its keys and the sizes of its outputs."""

SAMPLES_MIN = 8
"""Fewer cannot be judged."""

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process at rest: nothing is unconsumed, the log is drained, no request lives.

    cache    the cache's number
    objects  objects that Python's collector knows, without the samples
    held     bytes that the cache holds for steps: clones, outputs; not pool, pages and buffers
    """

    round: int
    cache: int
    seconds: float
    resident_bytes: int
    objects: int
    threads: int
    pages_held: int
    held_bytes: int


def count_objects(samples: int) -> int:
    """Collect garbage and count; `samples` have been kept since the soak began."""
    gc.collect()
    return len(gc.get_objects()) - samples


def take_sample(
    cache: PrefixCacheManager, samples: int, cache_number: int, seconds: float
) -> Sample:
    """Look at a cache at rest, for the sample behind so many."""
    pages_held = cache.stats()["pages_held"]
    assert isinstance(pages_held, int)
    memory = cache.memory_stats()
    return Sample(
        round=samples + 1,
        cache=cache_number,
        seconds=seconds,
        resident_bytes=_resident_bytes(),
        objects=count_objects(samples),
        threads=threading.active_count(),
        pages_held=pages_held,
        held_bytes=memory["deferred_device_bytes"] + memory["hit_output_bytes"],
    )


def _resident_bytes() -> int:
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Elsewhere the largest that it ever was, which is flat when the present one is.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class Flatness:
    """The last half of the samples, judged.

    The first half warms up allocators. Growth of the resident set is its least-squares slope
    times the length of the half; that of a cache's objects is the slope within the caches, whose
    settings differ, once they are warm; that of what ended caches leave is the slope over these.
    """

    resident_growth_bytes: float
    objects_per_round: float
    objects_per_cache: float
    threads: tuple[int, ...]
    pages_held_max: int

    @classmethod
    def of(cls, samples: Sequence[Sample], objects_left: Sequence[int]) -> Flatness:
        """Judge these samples, at least `SAMPLES_MIN`, and the objects left by each cache."""
        half = samples[len(samples) // 2 :]
        rounds = np.array([one.round for one in half], dtype=np.float64)
        resident = np.array([one.resident_bytes for one in half], dtype=np.float64)
        warm = [one for one in half if _warm(one, samples)]
        objects = np.array([one.objects for one in warm], dtype=np.float64)
        caches = np.array([one.cache for one in warm], dtype=np.int64)
        at = np.array([one.round for one in warm], dtype=np.float64)
        left = np.array(objects_left[len(objects_left) // 2 :], dtype=np.float64)
        return cls(
            resident_growth_bytes=_slope(rounds, resident) * float(rounds[-1] - rounds[0]),
            objects_per_round=_slope(at, objects, caches),
            objects_per_cache=_slope(np.arange(len(left), dtype=np.float64), left),
            threads=tuple(sorted({one.threads for one in half})),
            pages_held_max=max(one.pages_held for one in samples),
        )

    def faults(self) -> list[str]:
        """What is not flat, in words."""
        found = []
        if self.resident_growth_bytes > RESIDENT_GROWTH_BYTES_MAX:
            found.append(f"the resident set grew by {self.resident_growth_bytes:,.0f} B")
        if self.objects_per_round > OBJECTS_PER_ROUND_MAX:
            found.append(f"a cache keeps {self.objects_per_round:.2f} objects more every round")
        if self.objects_per_cache > OBJECTS_PER_CACHE_MAX:
            found.append(f"{self.objects_per_cache:.1f} objects are left of every cache")
        if len(self.threads) > 1:
            found.append(f"the number of threads at rest varies: {self.threads}")
        if self.pages_held_max:
            found.append(f"{self.pages_held_max} pages are held at rest")
        return found


Floats = npt.NDArray[np.float64]


def _warm(sample: Sample, samples: Sequence[Sample]) -> bool:
    """Whether its cache had played its first rounds."""
    before = sample.round - 1 - WARM_UP_ROUNDS
    return before >= 0 and samples[before].cache == sample.cache


def _slope(x: Floats, y: Floats, groups: npt.NDArray[np.int64] | None = None) -> float:
    """Least squares, each group with a level of its own; 0 where no group has two points."""
    groups = np.zeros(len(x), dtype=np.int64) if groups is None else groups
    dx, dy = x.copy(), y.copy()
    for group in np.unique(groups):
        own = groups == group
        dx[own] -= x[own].mean()
        dy[own] -= y[own].mean()
    spread = float((dx * dx).sum())
    return float((dx * dy).sum()) / spread if spread else 0.0
