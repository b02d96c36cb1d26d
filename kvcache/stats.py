"""Hit statistics (spec kv 2, 6)."""

from collections import deque
from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """What happened since the last `KVCacheManager.make_prefix_cache_stats`.

    A request is counted once, when it is admitted: a waiting request that is looked up again
    every step counts once (public issue 43736). Resumed requests go to `preempted_*`, so that
    their hits on their own blocks do not improve the hit rate (public issue 25780).
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, *, preempted: bool) -> None:
        """Count one admitted request of `num_tokens` tokens, `num_hits` of them hits."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class RecentHitRate:
    """Hit rate in tokens over the last `max_requests` first admissions, resumed ones left out."""

    def __init__(self, max_requests: int = 1000) -> None:
        self._max_requests = max_requests
        self._steps: deque[tuple[int, int, int]] = deque()
        self._requests = self._queries = self._hits = 0

    def observe(self, stats: PrefixCacheStats) -> None:
        """Add one step's statistics; a reset of the cache starts the rate anew."""
        if stats.reset:
            self._steps.clear()
            self._requests = self._queries = self._hits = 0
        if not stats.requests:
            return
        self._steps.append((stats.requests, stats.queries, stats.hits))
        self._add(1, self._steps[-1])
        while len(self._steps) > 1 and self._requests > self._max_requests:
            self._add(-1, self._steps.popleft())

    @property
    def rate(self) -> float:
        return self._hits / self._queries if self._queries else 0.0

    def _add(self, sign: int, step: tuple[int, int, int]) -> None:
        requests, queries, hits = step
        self._requests += sign * requests
        self._queries += sign * queries
        self._hits += sign * hits
