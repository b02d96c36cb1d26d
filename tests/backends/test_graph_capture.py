"""Nothing of ours becomes part of a graph, and nothing of ours breaks a capture elsewhere."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from slotmirror.backends.torch_device import capture_mode
from slotmirror.backends.torch_device.capture_mode import relaxed_by, relaxed_capture
from slotmirror.core.errors import UsageError
from support.stand_in.backends import OnStandIn
from support.stand_in.surfaces import captured


def test_no_copy_and_no_allocation_while_this_thread_captures(backend: OnStandIn) -> None:
    """Each refusal says what to do; afterwards all of it works, and nothing was captured."""
    rows = torch.empty_like(torch.zeros(2), device=backend.device)
    page = backend.alloc_host((2,), torch.float32, pinned=True)
    stream, fence = backend.new_stream(), backend.new_fence()
    engine = backend.current_stream()
    calls: dict[str, Callable[[], object]] = {
        "page-locked memory": lambda: backend.alloc_host((2,), torch.float32, pinned=True),
        "save outputs": lambda: backend.snapshot([rows]),
        "copy outputs": lambda: backend.copy_to_host([(rows, page.tensor)], stream, engine, fence),
        "rows to the device": lambda: backend.copy_to_device(page.tensor, stream),
    }
    with captured(backend.stand_in, engine.family):
        for what, call in calls.items():
            with pytest.raises(UsageError, match=rf"{what}.*while this thread captures a graph"):
                call()
    for call in calls.values():
        call()
    assert fence.wait(5.0)


def test_ordinary_memory_may_be_allocated_during_a_capture(backend: OnStandIn) -> None:
    """It asks nothing of the device."""
    with captured(backend.stand_in, backend.current_stream().family):
        assert backend.alloc_host((2,), torch.float32, pinned=False).pinned is False


def test_fences_are_queried_in_the_relaxed_mode(backend: OnStandIn) -> None:
    """Another thread captures in the global mode: our query does not break its capture."""
    fence = backend.new_fence()
    fence.record(backend.new_stream())
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            backend.bind_thread(backend.device)
            assert fence.wait(60.0)
        except BaseException as error:
            failures.append(error)

    with captured(backend.stand_in, backend.current_stream().family):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(60.0)
    assert failures == []
    assert backend.stand_in.queries_relaxed > 0


def test_a_query_that_is_not_relaxed_would_break_it(backend: OnStandIn) -> None:
    """The stand-in does what the drivers do, or the test above would prove nothing."""
    fence = backend.new_fence()
    fence.record(backend.new_stream())
    with (
        captured(backend.stand_in, backend.current_stream().family),
        pytest.raises(RuntimeError, match="broke a capture"),
    ):
        fence._event.query()


class Driver:
    """A driver with a mode per thread; refuses before it is initialised."""

    def __init__(self, *, ready: bool = True) -> None:
        self.mode = 0
        self.ready = ready
        self.seen: list[int] = []

    def exchange(self, pointer: object) -> int:
        if not self.ready:
            return 3
        value = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        self.mode, value.value = value.value, self.mode
        self.seen.append(self.mode)
        return 0


def test_the_threads_former_mode_comes_back() -> None:
    """Relaxed inside, as before outside, errors included: the engine's thread keeps its mode."""
    driver = Driver()
    driver.mode = 1

    def fail_inside() -> None:
        with relaxed_by(driver.exchange):
            assert driver.mode == 2
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert driver.mode == 1
    assert driver.seen == [2, 1]


def test_a_driver_that_is_not_initialised_is_left_alone() -> None:
    """Nothing is captured then; its mode is not set later by accident."""
    driver = Driver(ready=False)
    with relaxed_by(driver.exchange):
        driver.ready = True
    assert driver.seen == []


def test_a_missing_driver_or_symbol_is_no_error() -> None:
    """Older drivers have no such mode; the context then does nothing."""
    for library, symbol in [("libno_such_driver.so.1", "x"), ("libc.so.6", "no_such_symbol")]:
        with relaxed_capture(library, symbol)():
            pass


def test_a_driver_that_has_the_call_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbol is looked up in the library that was named."""
    driver = Driver()

    class Library:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"
            self.cuThreadExchangeStreamCaptureMode = driver.exchange

    monkeypatch.setattr(capture_mode.ctypes, "PyDLL", Library)
    with relaxed_capture("libcuda.so.1", "cuThreadExchangeStreamCaptureMode")():
        assert driver.mode == 2
    assert driver.mode == 0
