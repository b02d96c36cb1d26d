"""The requests that wait for admission, in the order of the policy (spec kv 6)."""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from enum import StrEnum

from slotmirror.kvcache.request import Request


class SchedulingPolicy(StrEnum):
    """Who is admitted first and preempted last."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RequestQueue(ABC):
    """Waiting requests; iteration is in the order of admission."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def put_back(self, request: Request) -> None:
        """A preempted request: ahead of those that never ran, as far as the policy allows."""

    @abstractmethod
    def peek(self) -> Request:
        """The next request; the queue must not be empty."""

    @abstractmethod
    def pop(self) -> Request:
        """Take the next request; the queue must not be empty."""

    @abstractmethod
    def remove(self, requests: Collection[Request]) -> None:
        """Take these out, wherever they are."""

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...

    @abstractmethod
    def __len__(self) -> int: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, requests: Collection[Request]) -> None:
        self._requests = deque(r for r in self._requests if r not in requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityRequestQueue(RequestQueue):
    """Smallest (priority, arrival time) first; a preempted request gets no better place."""

    def __init__(self) -> None:
        self._heap: list[Request] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def put_back(self, request: Request) -> None:
        heapq.heappush(self._heap, request)

    def peek(self) -> Request:
        return self._heap[0]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)

    def remove(self, requests: Collection[Request]) -> None:
        self._heap = [r for r in self._heap if r not in requests]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._heap))

    def __len__(self) -> int:
        return len(self._heap)


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """An empty queue of this policy."""
    return FCFSRequestQueue() if policy is SchedulingPolicy.FCFS else PriorityRequestQueue()
