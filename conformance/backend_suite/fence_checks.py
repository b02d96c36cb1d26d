"""Streams, fences, bounded waits and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from slotmirror.conformance.backend_suite.check import (
    CheckFailed,
    checks_of,
    require,
    require_bytes,
)
from slotmirror.conformance.backend_suite.landing import Landing
from slotmirror.conformance.backend_suite.values import random_rows
from slotmirror.conformance.backend_suite.workbench import BUSY_S, WAIT_S, Workbench

_SHORT_S = 0.02
_THREAD_LIMIT_S = 300.0


def an_unrecorded_fence_is_reached(bench: Workbench) -> None:
    """`done` and `wait` are true before the first `record`."""
    fence = bench.backend.new_fence()
    require(fence.done(), "a fence that was never recorded is not done")
    require(fence.wait(0.0), "waiting for a fence that was never recorded fails")


def a_fence_is_reached_only_behind_its_work(bench: Workbench) -> None:
    """While the stream is busy the fence is not done; afterwards it is, and stays so."""
    fence = bench.backend.new_fence()
    with bench.busy():
        fence.record(bench.backend.current_stream())
        reached = fence.done()
    require(not (reached and bench.can_be_busy), "a fence is done before the work in front of it")
    require(fence.wait(WAIT_S), "a fence behind finite work is never reached")
    require(fence.done(), "a reached fence is not done")


def waits_are_bounded(bench: Workbench) -> None:
    """`wait` gives up after its time, says so, and does not take much longer."""
    fence = bench.backend.new_fence()
    with bench.busy():
        fence.record(bench.backend.current_stream())
        started_s = bench.now()
        reached = fence.wait(_SHORT_S)
        waited_s = bench.now() - started_s
    if bench.can_be_busy:
        require(not reached, f"a wait of {_SHORT_S} s says that {BUSY_S} s of work are over")
        require(waited_s < BUSY_S / 2, f"a wait of {_SHORT_S} s took {waited_s:.3f} s")
    require(fence.wait(WAIT_S), "a fence is lost after a wait that gave up")


def a_fence_serves_again_and_again(bench: Workbench) -> None:
    """A page's fence is recorded for every use of the page; each time it means that use."""
    source = bench.tensor(torch.zeros(64, dtype=torch.int64))
    landing = Landing(bench, [source])
    for use in range(1, 6):
        values = bench.tensor(torch.full((64,), use, dtype=torch.int64))
        with bench.busy():
            bench.write(source, values)
            landing.launch([source])
            reached = landing.fence.done()
        require(not (reached and bench.can_be_busy), f"use {use}: done before its copy ran")
        require(landing.fence.wait(WAIT_S), f"use {use}: the fence is never reached")
        require(bool((landing.tensors[0] == use).all()), f"use {use}: bytes of another use")
    landing.wait()


def fences_are_independent(bench: Workbench) -> None:
    """A fence on an idle stream says nothing of one on a busy stream, and does not wait for it."""
    backend = bench.backend
    busy, idle = backend.new_fence(), backend.new_fence()
    stream = backend.new_stream()
    with bench.busy():
        busy.record(backend.current_stream())
        idle.record(stream)
        require(idle.wait(BUSY_S / 3), "a fence on an idle stream waits for another stream")
        reached = busy.done()
    require(not (reached and bench.can_be_busy), "one fence's end is taken for another's")
    require(busy.wait(WAIT_S), "a fence is lost")


def wait_on_holds_a_stream_back(bench: Workbench) -> None:
    """Work of a stream that waits for a fence sees what was queued before the fence."""
    backend = bench.backend
    values = random_rows((64, 8), torch.int64, seed=1)
    source, staged = bench.tensor(torch.zeros_like(values)), bench.tensor(values)
    landing = Landing(bench, [source])
    engine = backend.new_fence()
    with bench.busy():
        bench.write(source, staged)
        engine.record(backend.current_stream())
        engine.wait_on(landing.stream)
        # Behind another idle stream: only the fence orders the copy.
        landing.launch([source], after=backend.new_stream())
    require_bytes(landing.wait()[0], values, "a copy on a stream that waits for a fence")


def a_bound_thread_can_do_everything(bench: Workbench) -> None:
    """Threads that have bound themselves launch copies, record and wait like the first one."""
    backend = bench.backend
    values = random_rows((32, 16), torch.float32, seed=2)

    def work() -> None:
        backend.bind_thread(backend.device)
        source = bench.tensor(values)
        landing = Landing(bench, [source])
        landing.launch(backend.snapshot([source]))
        require_bytes(landing.wait()[0], values, "a copy by a thread of our own")

    _in_thread(bench, work)


def binding_makes_the_device_current(bench: Workbench) -> None:
    """A new thread sits on the first device until `bind_thread`."""
    backend = bench.backend

    def work() -> None:
        backend.bind_thread(backend.device)
        index = bench.current_device_index()
        require(
            index is None or index == (backend.device.index or 0),
            f"device {index} is current after binding to {backend.device}",
        )

    _in_thread(bench, work)


def a_fence_is_waited_for_by_another_thread(bench: Workbench) -> None:
    """The committer waits for fences that the engine's thread recorded."""
    backend = bench.backend
    fence = backend.new_fence()
    with bench.busy():
        fence.record(backend.current_stream())

    def work() -> None:
        backend.bind_thread(backend.device)
        require(fence.wait(WAIT_S), "a fence of another thread is never reached")

    _in_thread(bench, work)


def _in_thread(bench: Workbench, work: Callable[[], None]) -> None:
    """Run `work` in a new thread and raise here what it raised there."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with bench.active():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="conformance-check", daemon=True)
    thread.start()
    thread.join(_THREAD_LIMIT_S)
    if thread.is_alive():
        raise CheckFailed(f"a thread still waits after {_THREAD_LIMIT_S:g} s")
    if raised:
        raise raised[0]


FENCE_CHECKS = checks_of(
    an_unrecorded_fence_is_reached,
    a_fence_is_reached_only_behind_its_work,
    waits_are_bounded,
    a_fence_serves_again_and_again,
    fences_are_independent,
    wait_on_holds_a_stream_back,
    a_bound_thread_can_do_everything,
    binding_makes_the_device_current,
    a_fence_is_waited_for_by_another_thread,
)
