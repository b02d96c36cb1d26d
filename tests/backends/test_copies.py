"""Facts about copies (backends spec, section 3) that the base handles."""

from __future__ import annotations

import ast

import pytest
import torch

from slotmirror.backends.cuda import CudaBackend
from slotmirror.backends.torch_device import TorchDeviceBackend
from slotmirror.core.errors import BackendUnavailable
from support.caches import Driver, rows
from support.source_tree import ROOT, python_files
from support.stand_in.backends import OnStandIn
from support.stand_in.device import StandInStream


def device_rows(backend: OnStandIn, values: torch.Tensor) -> torch.Tensor:
    """A device tensor with these values."""
    tensor = torch.empty_like(values, device=backend.device)
    tensor.copy_(values)
    return tensor


def copied(backend: OnStandIn, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What arrives in a page-locked buffer of this dtype."""
    buffer = backend.alloc_host(source.shape, dtype, pinned=True)
    fence = backend.new_fence()
    backend.copy_to_host(
        [(source, buffer.tensor)], backend.new_stream(), backend.current_stream(), fence
    )
    assert fence.wait(5.0)
    return buffer.tensor


def test_the_dtype_is_converted_on_the_device(backend: OnStandIn) -> None:
    """A copy between dtypes would hold the engine: it becomes a conversion and a plain copy."""
    values = torch.arange(12.0).view(3, 4)
    source = device_rows(backend, values)
    before = backend.stand_in.synchronous_copies
    assert torch.equal(copied(backend, source, torch.float16), values.half())
    assert backend.stand_in.synchronous_copies == before


def test_strided_sources_are_made_contiguous_on_the_device(backend: OnStandIn) -> None:
    """The same for sources with strides."""
    values = torch.arange(12.0).view(3, 4)
    source = device_rows(backend, values)
    before = backend.stand_in.synchronous_copies
    assert torch.equal(copied(backend, source.t(), torch.float32), values.t())
    assert backend.stand_in.synchronous_copies == before


def test_what_a_copy_reads_is_kept_until_its_fence(backend: OnStandIn) -> None:
    """The contiguous copy of a strided source lives behind the fence, and not longer."""
    source = device_rows(backend, torch.arange(12.0).view(3, 4))
    buffer = backend.alloc_host((4, 3), torch.float32, pinned=True)
    fence = backend.new_fence()
    memory = backend.stand_in.memory
    before = memory.live_bytes
    backend.copy_to_host(
        [(source.t(), buffer.tensor)], backend.new_stream(), backend.current_stream(), fence
    )
    assert memory.live_bytes > before
    assert fence.wait(5.0)
    assert memory.live_bytes == before


def test_a_failed_launch_keeps_what_part_of_it_may_read(backend: OnStandIn) -> None:
    """Copies before the failing one run all the same; a later fence frees what they read."""
    source = device_rows(backend, torch.arange(12.0).view(3, 4))
    buffers = [backend.alloc_host((4, 3), torch.float32, pinned=True) for _ in range(2)]
    stream, fence = backend.new_stream(), backend.new_fence()
    memory = backend.stand_in.memory
    before = memory.live_bytes
    pairs = [(source.t(), buffer.tensor) for buffer in buffers]
    pairs.append((source, torch.zeros(5)))
    with pytest.raises(RuntimeError):
        backend.copy_to_host(pairs, stream, backend.current_stream(), fence)
    assert memory.live_bytes > before
    fence.record(stream)
    assert fence.wait(5.0)
    assert memory.live_bytes == before
    assert torch.equal(buffers[1].tensor, torch.arange(12.0).view(3, 4).t())


@pytest.mark.parametrize("committer", ["threaded", "inline"])
def test_a_cache_on_the_device_never_copies_synchronously(
    backend: OnStandIn, committer: str
) -> None:
    """Pages are page-locked and contiguous: 240 ms stalls per step came from pageable ones."""
    driver = Driver(backend=backend, committer=committer)
    driver.start({"a": (0, 4)}, new={"a": (0, [0])})
    hidden = device_rows(backend, rows(10, 4))
    before = backend.stand_in.synchronous_copies
    step = driver.save(hidden, {"layer": hidden.to(torch.bfloat16)})
    out = driver.cache.materialize(step)
    assert out.hidden_states is not None
    assert torch.equal(out.hidden_states["a"], rows(10, 4))
    assert backend.stand_in.synchronous_copies == before
    driver.cache.shutdown()
    assert backend.memory_info().pinned_bytes == 0


def test_rows_for_the_device_come_from_page_locked_memory_asynchronously(
    backend: OnStandIn,
) -> None:
    """`copy_to_device` returns before the copy ran; a stream behind its fence has the rows."""
    source = backend.alloc_host((3, 4), torch.float32, pinned=True)
    source.tensor.copy_(torch.arange(12.0).view(3, 4))
    before = backend.stand_in.synchronous_copies
    tensor, fence = backend.copy_to_device(source.tensor, backend.new_stream())
    assert not fence.done()
    assert backend.stand_in.synchronous_copies == before
    fence.wait_on(backend.current_stream())
    assert torch.equal(copied(backend, tensor + 1, torch.float32), source.tensor + 1)


def test_memory_of_device_rows_is_kept_until_they_have_arrived(backend: OnStandIn) -> None:
    """A consumer that drops the tensor at once does not let others write where the copy writes."""
    source = backend.alloc_host((3, 4), torch.float32, pinned=True)
    memory = backend.stand_in.memory
    before = memory.live_bytes
    tensor, fence = backend.copy_to_device(source.tensor, backend.new_stream())
    del tensor
    assert memory.live_bytes > before
    assert fence.wait(5.0)
    assert memory.live_bytes == before


def test_no_backend_selects_or_scatters_rows_on_the_device() -> None:
    """`index_copy_` is a loop there, `index_select` unsure for bf16: rows move as host bytes."""
    named = [
        f"{path.name}:{node.lineno}"
        for path in python_files(ROOT / "backends")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in {"index_select", "index_copy_", "index_copy", "gather", "scatter_"}
    ]
    assert named == []


def test_a_device_of_another_type_is_refused() -> None:
    """The error names both; nothing was opened."""
    with pytest.raises(BackendUnavailable, match="it serves cuda devices, not cpu"):
        CudaBackend(torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="built without an accelerator"):
        TorchDeviceBackend()


def test_no_step_takes_page_locked_memory_but_the_first(backend: OnStandIn) -> None:
    """A key's pages are opened once: nothing is page-locked while serving."""
    driver = Driver(backend=backend)
    driver.start({"a": (0, 4)}, new={"a": (0, [0])})
    hidden = device_rows(backend, rows(0, 4))
    driver.cache.materialize(driver.save(hidden))
    taken = backend.memory_info().pinned_bytes
    driver.start({"a": (4, 2)}, appended={"a": [1]})
    driver.cache.materialize(driver.save(device_rows(backend, rows(4, 2))))
    assert backend.memory_info().pinned_bytes == taken
    driver.cache.shutdown()


def test_rows_of_a_collective_on_its_own_stream_arrive_whole(backend: OnStandIn) -> None:
    """HCCL and NCCL work on streams of their own, which the engine's stream waits for.

    A snapshot and a copy behind the engine's stream see the collective's result; the copy is
    launched while the collective still runs.
    """
    device = backend.stand_in
    engine = backend.current_stream()
    assert isinstance(engine, StandInStream)
    collective = device.pooled_stream(engine.family, engine.index)
    hidden = device_rows(backend, torch.zeros(3, 4))
    reduced = device_rows(backend, torch.arange(12.0).view(3, 4))
    with device.using(collective):
        device.keep_busy(collective.queue, 0.5)
        hidden.copy_(reduced)
    page = backend.alloc_host((3, 4), torch.float32, pinned=True)
    fence, stream = backend.new_fence(), backend.new_stream()
    engine.wait_stream(collective)
    clones = backend.snapshot([hidden])
    backend.copy_to_host([(clones[0], page.tensor)], stream, engine, fence)
    assert not fence.done()
    assert fence.wait(5.0)
    assert torch.equal(page.tensor, torch.arange(12.0).view(3, 4))
