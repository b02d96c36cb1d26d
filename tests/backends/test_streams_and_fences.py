"""Facts about streams, events and threads (backends spec, section 3) that the base handles."""

from __future__ import annotations

import threading

import pytest
import torch

from slotmirror.backends.torch_device.fences import PolledWait
from slotmirror.core.errors import InternalError
from support.stand_in.backends import OnStandIn
from support.stand_in.device import StandInEvent
from support.stand_in.queues import Queue


def busy_queue(backend: OnStandIn) -> Queue:
    """The engine's stream, occupied for half a virtual second."""
    queue = backend.stand_in.current("any", 1).queue
    backend.stand_in.keep_busy(queue, 0.5)
    return queue


def test_a_few_streams_are_created_once(backend: OnStandIn) -> None:
    """No stream before one is asked for; then at most four, however often somebody asks."""
    assert backend.stand_in.streams_made == 0
    streams = [backend.new_stream() for _ in range(100)]
    assert backend.stand_in.streams_made == 4
    assert len({id(stream) for stream in streams}) == 4


def test_a_step_makes_no_stream_and_a_fence_lives_as_long_as_its_page(backend: OnStandIn) -> None:
    """A hundred copies with one stream and one fence: torch's pools are not touched again."""
    stream, fence = backend.new_stream(), backend.new_fence()
    page = backend.alloc_host((4, 4), torch.float32, pinned=True)
    for number in range(100):
        rows = torch.empty_like(torch.zeros(4, 4), device=backend.device)
        rows.fill_(number)
        backend.copy_to_host([(rows, page.tensor)], stream, backend.current_stream(), fence)
        assert fence.wait(1.0)
        assert bool((page.tensor == number).all())
    assert backend.stand_in.streams_made == 1


def test_a_fence_is_recorded_again_only_after_it_was_reached(backend: OnStandIn) -> None:
    """Recording a pending fence is our own bug: whoever waits would wait for the wrong work."""
    fence = backend.new_fence()
    busy_queue(backend)
    fence.record(backend.current_stream())
    with pytest.raises(InternalError, match="recorded again before it was reached"):
        fence.record(backend.current_stream())
    assert fence.wait(5.0)
    fence.record(backend.current_stream())


def test_waits_are_bounded_by_the_clock_and_pauses_grow() -> None:
    """Not a moment longer than asked; asking at 0.1, 0.2, 0.4, ... 2 ms, not in a spin."""
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    wait = PolledWait(lambda: now[0], sleep)
    assert wait.until(lambda: False, 0.01) is False
    assert now[0] == pytest.approx(0.01)
    assert pauses[:6] == pytest.approx([0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.002])
    assert max(pauses) <= 0.002
    assert wait.until(lambda: now[0] > 0.05, 1.0) is True
    assert now[0] < 0.055


def test_a_wait_without_time_asks_once() -> None:
    """`wait(0)` is a question."""
    wait = PolledWait(lambda: 0.0, lambda seconds: pytest.fail("it slept"))
    assert wait.until(lambda: True, 0.0) is True
    assert wait.until(lambda: False, 0.0) is False


def test_a_lost_device_ends_a_wait_with_its_error(backend: OnStandIn) -> None:
    """Waiters get the device's error, not a time-out."""
    fence = backend.new_fence()
    busy_queue(backend)
    fence.record(backend.current_stream())
    backend.stand_in.lost = RuntimeError("device 1 fell off the bus")
    with pytest.raises(RuntimeError, match="fell off the bus"):
        fence.wait(60.0)


def test_two_threads_may_wait_for_one_fence(backend: OnStandIn) -> None:
    """The committer and a builder wait for the same page."""
    fence = backend.new_fence()
    busy_queue(backend)
    fence.record(backend.current_stream())
    reached: list[bool] = []

    def wait() -> None:
        backend.bind_thread(backend.device)
        reached.append(fence.wait(60.0))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert reached == [True, True]


def test_a_late_answer_is_about_its_own_recording(backend: OnStandIn) -> None:
    """A waiter that answers after the next recording does not end that one."""
    fence = backend.new_fence()
    fence.record(backend.current_stream())
    event = fence._event
    query = event.query

    def query_then_record_anew() -> bool:
        event.query = query
        while not query():
            pass
        assert fence.done()
        busy_queue(backend)
        fence.record(backend.current_stream())
        return True

    event.query = query_then_record_anew
    assert fence.done() is True
    assert fence.done() is False


def test_a_new_thread_sits_on_device_0_until_it_is_bound(backend: OnStandIn) -> None:
    """The backend serves device 1: unbound threads are refused by the device, bound ones serve."""
    results: list[object] = []

    def use_then_bind() -> None:
        results.append(backend.stand_in.current_index)
        fence = backend.new_fence()
        with pytest.raises(RuntimeError, match="thread on device 0"):
            fence.record(backend.current_stream())
        backend.bind_thread(backend.device)
        fence.record(backend.current_stream())
        results.append(fence.wait(1.0))

    thread = threading.Thread(target=use_then_bind)
    thread.start()
    thread.join(60.0)
    assert results == [0, True]


def test_streams_and_events_are_of_one_family(backend: OnStandIn) -> None:
    """A native event in a generic stream's wait is refused or lost: we never offer the chance."""
    family = backend.current_stream().family
    assert backend.new_stream().family == family
    foreign = StandInEvent(backend.stand_in, f"not {family}")
    with pytest.raises(TypeError, match="event and a"):
        foreign.wait(backend.new_stream())
    backend.new_fence().record(backend.new_stream())


def test_a_fence_or_stream_of_another_backend_is_refused(backend: OnStandIn) -> None:
    """Mixing would drop an order silently; nothing is copied."""
    page = backend.alloc_host((2,), torch.float32, pinned=True)
    rows = torch.empty_like(torch.zeros(2), device=backend.device)
    stream = backend.new_stream()
    with pytest.raises(TypeError, match="is not of this backend"):
        backend.copy_to_host([(rows, page.tensor)], stream, backend.current_stream(), object())
    with pytest.raises(TypeError, match="is not of this backend"):
        backend.copy_to_host(
            [(rows, page.tensor)], None, backend.current_stream(), backend.new_fence()
        )
    assert len(stream.queue) == 0
