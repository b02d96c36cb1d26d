"""Whose memory the simulated device's is, on both sides."""

from __future__ import annotations

import pytest
import torch

from slotmirror.conformance.simulated.memory import DEVICE_POISON
from slotmirror.core.errors import NotSupported
from support.still_device import all_bytes, launched, run, still


def test_freed_device_memory_is_poisoned_behind_the_work_of_its_own_stream() -> None:
    """Kernels of the engine's stream still read it; a copy on another stream reads poison."""
    backend = still()
    [clone] = backend.snapshot([backend.upload(torch.ones(4))])
    target = backend.empty((4,), torch.float32)
    raw, source = backend._memory.raw(target), backend._memory.raw(clone)
    backend.engine_stream.append(lambda: raw.write(source.read()))
    buffer, _, stream = launched(backend, clone)
    del clone
    run(backend, backend.engine_stream)
    run(backend, stream)
    assert torch.equal(target, torch.ones(4))
    assert all_bytes(buffer.tensor) == {DEVICE_POISON}


def test_only_its_own_tensors_are_on_the_device() -> None:
    """Views are; host tensors, though they are CPU tensors too, are not; dead ones are gone."""
    backend = still()
    tensor = backend.empty((3, 2), torch.float16)
    assert backend.owns(tensor[1:])
    assert not backend.owns(torch.zeros(3, 2))
    assert backend.live_device_bytes == 12
    del tensor
    assert backend.live_device_bytes == 0


def test_rows_reach_the_device_when_the_queue_of_their_copy_gets_there() -> None:
    """Until then the tensor is poison and its fence is not reached; strided sources are packed."""
    backend = still()
    stream = backend.new_stream()
    source = torch.arange(6, dtype=torch.int16).view(3, 2)
    sent, fence = backend.copy_to_device(source[::2], stream)
    assert backend.owns(sent)
    assert all_bytes(sent) == {DEVICE_POISON}
    assert not fence.done()
    run(backend, stream)
    assert fence.done()
    assert torch.equal(sent, source[::2])
    found = backend.bytes_on_device(sent[1:])
    assert found is not None
    assert found.tolist() == [4, 0, 5, 0]
    assert backend.bytes_on_device(source) is None
    assert backend.violations == []


def test_a_source_that_is_freed_under_its_copy_to_the_device_is_a_violation() -> None:
    """The copy does not keep its source alive; whoever asked for it must."""
    backend = still()
    stream = backend.new_stream()
    source = torch.ones(3)
    sent, _ = backend.copy_to_device(source, stream)
    del source
    run(backend, stream)
    assert all_bytes(sent) == {DEVICE_POISON}
    assert backend.violations == ["a copy to the device read host memory that was freed meanwhile"]


def test_a_profile_without_device_copies_refuses_them() -> None:
    """As the interface's default does."""
    backend = still("synchronous")
    assert not backend.capabilities.device_copies
    with pytest.raises(NotSupported, match="device_copies"):
        backend.copy_to_device(torch.ones(2), backend.new_stream())


def test_host_memory_is_open_until_it_is_closed_or_its_last_tensor_dies() -> None:
    """Recycled outputs close nothing: their memory ends with them."""
    backend = still()
    closed = backend.alloc_host((3,), torch.uint8, pinned=True)
    dropped = backend.alloc_host((5,), torch.uint8, pinned=True)
    rows = dropped.tensor[1:]
    held = closed.reserved_bytes + dropped.reserved_bytes
    assert backend.open_host_bytes == backend.memory_info().pinned_bytes == held
    closed.close()
    reserved = dropped.reserved_bytes
    del dropped
    assert backend.open_host_bytes == reserved
    del rows
    assert backend.open_host_bytes == 0
