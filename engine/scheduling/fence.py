"""Blocks of requests that end while a step still writes them (public issue 45357)."""

from collections import deque
from collections.abc import Iterable, Set

from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import Request


class StepFence:
    """Gives blocks back at once, or when the last step that writes them has come back.

    Steps come back in the order in which they were scheduled. Bounded by the steps in flight.
    """

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._steps: deque[frozenset[str]] = deque()
        self._num_returned = 0
        self._fenced: deque[tuple[int, list[int]]] = deque()

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._steps)

    def step_scheduled(self, req_ids: Iterable[str]) -> None:
        """A step that computes these requests is on its way; one without any is not tracked."""
        step = frozenset(req_ids)
        if step:
            self._steps.append(step)

    def check_is_next(self, req_ids: Set[str]) -> None:
        """Raise ValueError unless the oldest step in flight computes these requests."""
        if not self._steps or self._steps[0] != req_ids:
            raise ValueError(
                f"a step of requests {sorted(req_ids)} is not the oldest in flight: every step "
                "comes back once, in the order of schedule"
            )

    def step_came_back(self) -> None:
        """The oldest step in flight has written all it will."""
        self._steps.popleft()
        self._num_returned += 1
        while self._fenced and self._fenced[0][0] <= self._num_returned:
            self._manager.pool.free(self._fenced.popleft()[1])

    def free(self, request: Request) -> None:
        """Give back the request's blocks as soon as no step in flight computes it."""
        if not any(request.request_id in step for step in self._steps):
            self._manager.free(request)
            return
        blocks = self._manager.pop_blocks(request)
        self._fenced.append((self._num_returned + len(self._steps), blocks))
