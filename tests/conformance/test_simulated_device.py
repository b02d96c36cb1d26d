"""The simulated device is at least as late, and as strict, as a real one."""

from __future__ import annotations

import threading

import pytest
import torch

from slotmirror.conformance.simulated import (
    PROFILES,
    FaultKind,
    InjectedFault,
    SimulatedBackend,
)
from slotmirror.conformance.simulated.memory import DEVICE_POISON, HOST_POISON
from slotmirror.core.registry import list_backends, load_backend
from support.still_device import all_bytes, launched, run, still


def test_it_is_installed_by_name_only() -> None:
    """The entry point leads to it; the automatic choice never takes it."""
    assert "simulated" in {one.name for one in list_backends()}
    assert isinstance(load_backend("simulated"), SimulatedBackend)
    assert not SimulatedBackend.automatic


def test_nothing_moves_until_its_queue_is_stepped() -> None:
    """Kernel, snapshot and copy wait in their queues; the host reads poison until the end."""
    backend = still()
    values = torch.arange(6, dtype=torch.int64).view(3, 2)
    source = backend.upload(values)
    assert all_bytes(source) == {DEVICE_POISON}
    [clone] = backend.snapshot([source])
    buffer, fence, stream = launched(backend, clone)
    run(backend, stream)
    assert all_bytes(buffer.tensor) == {HOST_POISON}
    assert not fence.done()
    run(backend, backend.engine_stream)
    run(backend, stream)
    assert fence.done()
    assert torch.equal(buffer.tensor, values)


def test_a_copy_waits_for_the_engines_work_and_for_no_later_work() -> None:
    """What the engine queued before the launch comes first; what it queues afterwards may not."""
    backend = still()
    source = backend.upload(torch.ones(2, 2))
    buffer, _, stream = launched(backend, source)
    backend.fill(source, 0)
    run(backend, backend.engine_stream)
    run(backend, stream)
    assert all_bytes(buffer.tensor) == {0}


def test_a_clone_is_not_touched_by_the_next_forward() -> None:
    """`snapshot` is ordered on the engine's stream, before what overwrites the original."""
    backend = still()
    source = backend.upload(torch.full((2, 2), 7.0))
    [clone] = backend.snapshot([source])
    backend.fill(source, 0)
    buffer, _, stream = launched(backend, clone)
    run(backend, backend.engine_stream)
    run(backend, stream)
    assert torch.equal(buffer.tensor, torch.full((2, 2), 7.0))


def test_strided_sources_arrive_packed() -> None:
    """A clone of every other row has its rows one behind the other."""
    backend = still()
    values = torch.arange(12, dtype=torch.int16).view(6, 2)
    source = backend.upload(values)
    [clone] = backend.snapshot([source[::2]])
    run(backend, backend.engine_stream)
    assert torch.equal(clone, values[::2])


def test_a_fence_that_was_never_recorded_is_reached() -> None:
    """And a wait for it does not wait."""
    backend = still()
    fence = backend.new_fence()
    assert fence.done()
    assert fence.wait(9.0)


def test_a_wait_is_bounded_and_says_whether_it_was_reached() -> None:
    """The pacing is given the time; the answer is the fence's."""
    backend = still()
    buffer, fence, stream = launched(backend, backend.upload(torch.ones(1)))
    assert not fence.wait(3.0)
    assert backend._pacing.waits == [3.0]  # type: ignore[attr-defined]
    run(backend, backend.engine_stream)
    run(backend, stream)
    assert fence.wait(3.0)
    buffer.close()


def test_wait_on_holds_another_queue_back() -> None:
    """Work behind it does not run before the fence is reached."""
    backend = still()
    fence, other = backend.new_fence(), backend.new_stream()
    backend.engine_stream.append(lambda: None)
    fence.record(backend.engine_stream)
    fence.wait_on(other)
    assert other not in backend.steppable()
    run(backend, backend.engine_stream)
    assert other in backend.steppable()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda backend, fence: fence.record(backend.engine_stream), "recorded again before"),
        (lambda backend, fence: _copy_elsewhere(backend), "not a contiguous host buffer"),
        (lambda backend, fence: _copy_other_type(backend), "changes its layout"),
        (lambda backend, fence: _close_under_copy(backend), "closed meanwhile"),
        (lambda backend, fence: _call_unbound(backend), "has not bound itself"),
    ],
)
def test_breaches_of_the_contract_are_noted(break_it, says) -> None:  # type: ignore[no-untyped-def]
    """Each one once, with what was broken."""
    backend = still()
    fence = backend.new_fence()
    fence.record(backend.engine_stream)
    break_it(backend, fence)
    [violation] = backend.violations
    assert says in violation


def _copy_elsewhere(backend: SimulatedBackend) -> None:
    pairs = [(backend.upload(torch.ones(2)), torch.ones(2))]
    backend.copy_to_host(pairs, backend.new_stream(), backend.engine_stream, backend.new_fence())


def _copy_other_type(backend: SimulatedBackend) -> None:
    target = backend.alloc_host((2,), torch.float64, pinned=False)
    pairs = [(backend.upload(torch.ones(2)), target.tensor)]
    backend.copy_to_host(pairs, backend.new_stream(), backend.engine_stream, backend.new_fence())


def _close_under_copy(backend: SimulatedBackend) -> None:
    buffer, _, stream = launched(backend, backend.upload(torch.ones(2)))
    buffer.close()
    run(backend, backend.engine_stream)
    run(backend, stream)


def _call_unbound(backend: SimulatedBackend) -> None:
    thread = threading.Thread(target=backend.new_fence)
    thread.start()
    thread.join()


def test_each_thread_has_a_current_stream_of_its_own() -> None:
    """A thread that is not the engine's must not rely on its own stream for the engine's order."""
    backend = still()
    found: list[object] = []

    def look() -> None:
        backend.bind_thread(backend.device)
        found.append(backend.current_stream())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert backend.current_stream() is backend.engine_stream
    assert found[0] is not backend.engine_stream


@pytest.mark.parametrize(
    "kind", [FaultKind.ALLOCATION, FaultKind.SNAPSHOT, FaultKind.POOL_WRITE, FaultKind.BIND]
)
def test_the_armed_occurrence_fails_and_only_that(kind: FaultKind) -> None:
    """The second of three calls raises, with a text that names it."""
    backend = still()
    backend.faults.arm(kind, 2)
    pool = torch.zeros(2, 8, dtype=torch.uint8).numpy().view("V8")[:, 0]
    calls = {
        FaultKind.ALLOCATION: lambda: backend.alloc_host((1,), torch.uint8, pinned=False),
        FaultKind.SNAPSHOT: lambda: backend.snapshot([backend.empty((1,), torch.uint8)]),
        FaultKind.POOL_WRITE: lambda: backend.scatter_slots(pool, _first(), pool[:1]),
        FaultKind.BIND: lambda: backend.bind_thread(backend.device),
    }
    calls[kind]()
    with pytest.raises(InjectedFault, match=f"{kind.name.lower()} number 2"):
        calls[kind]()
    calls[kind]()
    assert backend.faults.raised == [f"injected fault: {kind.name.lower()} number 2"]


def _first():  # type: ignore[no-untyped-def]
    return torch.zeros(1, dtype=torch.int64).numpy()


def test_a_failed_copy_is_reported_by_the_fences_behind_it() -> None:
    """Asking and waiting both raise, each time with an error of its own."""
    backend = still()
    backend.faults.arm(FaultKind.COPY_RUN, 1)
    _, fence, stream = launched(backend, backend.upload(torch.ones(2)))
    run(backend, backend.engine_stream)
    run(backend, stream)
    errors = []
    for ask in (fence.done, lambda: fence.wait(1.0)):
        with pytest.raises(InjectedFault, match="copy_run number 1") as caught:
            ask()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_a_failed_launch_may_have_queued_part_of_its_copies() -> None:
    """No fence stands behind them: only a new one tells when the memory is quiet."""
    backend = still()
    backend.faults.arm(FaultKind.COPY_LAUNCH, 1)
    buffer = backend.alloc_host((8, 1), torch.uint8, pinned=True)
    source = backend.upload(torch.arange(8, dtype=torch.uint8).view(8, 1))
    pairs = [(source[i : i + 1], buffer.tensor[i : i + 1]) for i in range(8)]
    fence, stream = backend.new_fence(), backend.new_stream()
    with pytest.raises(InjectedFault, match="copy_launch"):
        backend.copy_to_host(pairs, stream, backend.engine_stream, fence)
    assert fence.done()
    run(backend, backend.engine_stream)
    run(backend, stream)
    arrived = int((buffer.tensor.flatten() == torch.arange(8)).sum())
    assert 0 <= arrived < 8


def test_a_lost_device_moves_nothing_and_answers_nobody() -> None:
    """Queues stand still; launches and fences raise the loss."""
    backend = still()
    backend.faults.arm(FaultKind.DEVICE_LOST, 1)
    source = backend.upload(torch.ones(2))
    _, fence, _ = launched(backend, source)
    backend.step(backend.engine_stream)
    assert backend.steppable() == []
    for ask in (fence.done, lambda: fence.wait(1.0), lambda: backend.snapshot([source])):
        with pytest.raises(InjectedFault, match="device_lost number 1"):
            ask()


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_differ_as_they_say(name: str) -> None:
    """Pinning, alignment and synchrony are what the capabilities declare."""
    backend = still(name)
    profile, able = PROFILES[name], backend.capabilities
    buffer = backend.alloc_host((5, 3), torch.uint8, pinned=True)
    assert buffer.pinned == able.pinned_host == profile.pinned_host
    assert buffer.tensor.data_ptr() % able.host_alignment_bytes == 0
    source = backend.upload(torch.ones(4, 2))
    copied, fence, _ = launched(backend, source)
    assert fence.done() == (not able.async_copy)
    assert torch.equal(copied.tensor, torch.ones(4, 2)) == (not able.async_copy)


def test_the_slow_profile_copies_row_by_row() -> None:
    """Between two steps of the queue one more row has arrived."""
    backend = still("slow")
    source = backend.upload(torch.ones(3, 2))
    buffer, _, stream = launched(backend, source)
    run(backend, backend.engine_stream)
    arrived = []
    while stream in backend.steppable():
        arrived.append(int((buffer.tensor == 1).all(dim=1).sum()))
        backend.step(stream)  # type: ignore[arg-type]
    assert arrived == [0, 0, 1, 2, 3]


def test_on_real_threads_waiting_and_asking_move_the_queues() -> None:
    """Without a test's pacing a wait ends, and so does polling; the seed gives the order."""
    backend = SimulatedBackend(seed=3)
    source = backend.upload(torch.ones(2))
    buffer, fence, _ = launched(backend, source)
    assert fence.wait(5.0)
    assert torch.equal(buffer.tensor, torch.ones(2))
    _, fence, _ = launched(backend, source)
    assert any(fence.done() for _ in range(50))


def test_on_real_threads_a_wait_for_a_queue_that_stands_still_ends_in_time() -> None:
    """False after the time that was given."""
    backend = SimulatedBackend()
    backend.engine_stream.append(lambda: None, lambda: False)
    fence = backend.new_fence()
    fence.record(backend.engine_stream)
    assert not fence.wait(0.01)
