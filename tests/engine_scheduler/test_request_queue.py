"""Order of the waiting requests under both policies (spec kv 6)."""

import pytest

from slotmirror.engine.scheduling.request_queue import SchedulingPolicy, create_request_queue
from slotmirror.kvcache.request import Request


def request(req_id, priority=0, arrival=0.0):
    return Request(req_id, [1], priority=priority, arrival_time=arrival)


def ids(queue):
    return [each.request_id for each in queue]


def test_fcfs_puts_preempted_requests_in_front():
    """New ones at the back, preempted ones at the front."""
    queue = create_request_queue(SchedulingPolicy.FCFS)
    for name in "abc":
        queue.add(request(name))
    queue.put_back(request("p"))
    assert ids(queue) == ["p", "a", "b", "c"]
    assert queue.pop().request_id == "p"
    assert queue.peek().request_id == "a"
    assert len(queue) == 3


def test_priority_knows_no_front():
    """A preempted request gets the place of its priority and arrival."""
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    queue.add(request("late", 1, 2.0))
    queue.add(request("urgent", 0, 3.0))
    queue.put_back(request("early", 1, 1.0))
    assert ids(queue) == ["urgent", "early", "late"]
    assert queue.peek().request_id == "urgent"
    assert [queue.pop().request_id for _ in range(3)] == ["urgent", "early", "late"]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_requests_can_be_taken_out_of_the_middle(policy):
    """The others keep their order."""
    queue = create_request_queue(policy)
    requests = [request(name, arrival=float(i)) for i, name in enumerate("abcde")]
    for each in requests:
        queue.add(each)
    queue.remove([requests[1], requests[3]])
    assert ids(queue) == ["a", "c", "e"]
