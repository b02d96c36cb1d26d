"""How long cached blocks live and how often they are reused: a sampled measurement (spec kv 3)."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slotmirror.kvcache.block_pool import PoolObserver

_MAX_ACCESSES = 4
_NS_PER_SECOND = 1e9


@dataclass(frozen=True)
class ResidencySample:
    """One sampled block at its eviction, in seconds."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


@dataclass
class _Residency:
    birth_ns: int
    last_access_ns: int
    accesses_ns: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_ACCESSES))


class ResidencyMetrics(PoolObserver):
    """Follows a sampled share of the blocks from when they are handed out until they are reused
    or evicted. Bounded: one record per sampled block, the last 4 access times in it.

    `clock_ns` and `rng` are injected by tests.
    """

    def __init__(
        self,
        sample_rate: float = 0.01,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        rng: random.Random | None = None,
    ) -> None:
        if not 0.0 < sample_rate <= 1.0:
            raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
        self._sample_rate = sample_rate
        self._clock_ns = clock_ns
        self._rng = rng or random.Random()
        self._tracked: dict[int, _Residency] = {}
        self._samples: list[ResidencySample] = []

    def on_taken(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._finish(block)
            if self._rng.random() < self._sample_rate:
                now = self._clock_ns()
                self._tracked[block] = _Residency(now, now)

    def on_touched(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            residency = self._tracked.get(block)
            if residency is not None:
                residency.last_access_ns = self._clock_ns()
                residency.accesses_ns.append(residency.last_access_ns)

    def on_evicted(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._finish(block)

    def on_reset(self) -> None:
        self._tracked.clear()
        self._samples.clear()

    def take_samples(self) -> list[ResidencySample]:
        """The samples completed since the last call."""
        samples, self._samples = self._samples, []
        return samples

    def _finish(self, block: int) -> None:
        residency = self._tracked.pop(block, None)
        if residency is None:
            return
        now = self._clock_ns()
        self._samples.append(
            ResidencySample(
                lifetime_s=(now - residency.birth_ns) / _NS_PER_SECOND,
                idle_s=(now - residency.last_access_ns) / _NS_PER_SECOND,
                reuse_gaps_s=tuple(
                    (after - before) / _NS_PER_SECOND
                    for before, after in pairwise(residency.accesses_ns)
                ),
            )
        )
