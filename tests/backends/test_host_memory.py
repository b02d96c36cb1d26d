"""Facts about page-locked and ordinary host memory (backends spec, section 3)."""

from __future__ import annotations

import logging

import pytest
import torch

from slotmirror.backends.torch_device import host_memory
from slotmirror.backends.torch_device.host_memory import PinnedMeter, torch_pinned_bytes
from slotmirror.backends.torch_device.registered_memory import RegisteredBuffer, RegisteredChunks
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy
from support.stand_in.backends import OnStandIn, StandInCuda

GIB = 1 << 30


def test_torch_rounds_page_locked_memory_to_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the allocator's threshold is set, and the size is above it."""
    for name in host_memory._ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert [torch_pinned_bytes(n) for n in (1, 64, 65, 1000, 1 << 20)] == [
        1,
        64,
        128,
        1024,
        1 << 20,
    ]
    assert torch_pinned_bytes(3 * GIB) == 4 * GIB
    for name in host_memory._ALLOCATOR_SETTINGS:
        monkeypatch.setenv(name, "expandable_segments:True,pinned_max_round_threshold_mb:2048")
        assert torch_pinned_bytes(3 * GIB) == 3 * GIB
        assert torch_pinned_bytes(GIB + 1) == 2 * GIB
        monkeypatch.delenv(name)


def test_the_true_page_locked_size_is_reported(backend: OnStandIn) -> None:
    """What the driver gave away equals what buffers and meter say."""
    buffers = [backend.alloc_host((n,), torch.uint8, pinned=True) for n in (1, 100, 5000)]
    assert [buffer.reserved_bytes for buffer in buffers] == [64, 128, 8192]
    assert backend.memory_info().pinned_bytes == sum(b.reserved_bytes for b in buffers)
    assert backend.stand_in.pinned.num_bytes == backend.memory_info().pinned_bytes
    for buffer in buffers:
        buffer.close()
    assert backend.memory_info().pinned_bytes == 0


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 1000, 3 << 20])
@pytest.mark.parametrize("pinned", [False, True])
def test_addresses_are_aligned_to_64_bytes(
    backend: OnStandIn, num_bytes: int, pinned: bool
) -> None:
    """Ascend asks for it; sizes are rounded up to it as well."""
    buffer = backend.alloc_host((num_bytes,), torch.uint8, pinned=pinned)
    assert buffer.tensor.data_ptr() % 64 == 0
    assert buffer.reserved_bytes % 64 == 0
    assert buffer.reserved_bytes >= num_bytes


def test_memory_that_cannot_be_page_locked_is_ordinary_and_said_to_be(
    backend: OnStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    """Small limits of locked memory are common in containers: serving goes on, with a warning."""
    backend.stand_in.pinned_bytes_max = 1000
    with caplog.at_level(logging.WARNING, "slotmirror.backends"):
        buffer = backend.alloc_host((5000,), torch.uint8, pinned=True)
    assert buffer.pinned is False
    assert backend.memory_info().pinned_bytes == 0
    assert "5056 bytes could not be page-locked" in caplog.text
    assert "ulimit -l" in caplog.text


class Registration:
    """A driver that page-locks what it is told to, up to a limit of calls."""

    def __init__(self, calls_max: int = 1 << 30) -> None:
        self.locked: dict[int, int] = {}
        self._calls_max = calls_max

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.locked) == self._calls_max:
            raise RuntimeError("the driver refuses")
        self.locked[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


def test_a_large_buffer_is_registered_in_chunks() -> None:
    """Every byte once, no piece larger than a chunk; the size is exact but for whole pages."""
    registration, meter = Registration(), PinnedMeter()
    chunks = RegisteredChunks(registration, chunk_bytes=8192)
    buffer = RegisteredBuffer((10_000,), torch.int16, meter, chunks)
    assert buffer.pinned
    assert buffer.reserved_bytes == 5 * 4096
    start = buffer.tensor.data_ptr()
    assert registration.locked == {start: 8192, start + 8192: 8192, start + 16384: 4096}
    assert meter.num_bytes == buffer.reserved_bytes
    buffer.close()
    buffer.close()
    assert registration.locked == {}
    assert meter.num_bytes == 0


def test_a_refused_chunk_leaves_nothing_registered() -> None:
    """The error is the driver's; chunks before it are given back."""
    registration, meter = Registration(calls_max=2), PinnedMeter()
    chunks = RegisteredChunks(registration, chunk_bytes=8192)
    with pytest.raises(RuntimeError, match="the driver refuses"):
        RegisteredBuffer((30_000,), torch.uint8, meter, chunks)
    assert registration.locked == {}
    assert meter.num_bytes == 0


def test_no_copy_crosses_a_chunk() -> None:
    """Drivers refuse a copy over two registrations: it is cut at the edges, to the byte."""
    chunks = RegisteredChunks(Registration(), chunk_bytes=8192)
    buffer = RegisteredBuffer((1000, 7), torch.int32, PinnedMeter(), chunks)
    source = torch.arange(7000, dtype=torch.int32).view(1000, 7)
    for first, count in [(0, 1000), (290, 5), (0, 290), (293, 100)]:
        target = buffer.tensor[first : first + count]
        pieces = chunks.cut(source[first : first + count], target)
        start = buffer.tensor.data_ptr()
        for piece, place in pieces:
            offset = place.data_ptr() - start
            assert offset // 8192 == (offset + place.nbytes - 1) // 8192
            place.copy_(piece)
        assert torch.equal(target, source[first : first + count])
        assert (len(pieces) > 1) == (first * 28 // 8192 != ((first + count) * 28 - 1) // 8192)
    elsewhere = torch.empty(1000, 7, dtype=torch.int32)
    assert len(chunks.cut(source, elsewhere)) == 1


def test_memory_whose_buffer_nobody_closes_is_released_with_its_last_view(
    backend: OnStandIn,
) -> None:
    """Recycled outputs keep the memory alone: it is page-locked as long as somebody has it."""
    memory = backend.alloc_host((5000,), torch.uint8, pinned=True).tensor.numpy()
    assert backend.memory_info().pinned_bytes == 8192
    del memory
    assert backend.memory_info().pinned_bytes == 0


def test_registered_memory_is_unregistered_before_it_is_unmapped() -> None:
    """The same for registered memory: the driver must not keep an address that is gone."""
    registration, meter = Registration(), PinnedMeter()
    memory = RegisteredBuffer(
        (9000,), torch.uint8, meter, RegisteredChunks(registration)
    ).tensor.numpy()
    view = memory[5:9]
    del memory
    assert len(registration.locked) == 1
    assert meter.num_bytes == 3 * 4096
    del view
    assert registration.locked == {}
    assert meter.num_bytes == 0


def test_pin_pool_registers_the_pool_at_start_up(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pin_pool` and `preallocate`: the pool is registered before the first step, exactly sized."""
    monkeypatch.setattr("slotmirror.backends.torch_device.backend.REGISTERED_BYTES_MIN", 1 << 16)
    config = PrefixCacheConfig(
        num_blocks=640, block_size=16, staging_capacity_tokens=4, pin_pool=True
    )
    cache = PrefixCacheManager(config, cuda)
    cache.register_policy(ModelCachePolicy())
    cache.preallocate([KeySpec(HIDDEN_KEY, (24,), torch.bfloat16)])
    pool_bytes = 640 * 16 * 48
    assert sum(cuda.stand_in.pinned.registered.values()) == pool_bytes
    assert cache.memory_stats()["pool_bytes"] == pool_bytes
    cache.shutdown()
    assert cuda.stand_in.pinned.registered == {}


def test_a_pool_that_cannot_be_registered_is_ordinary(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime's error code is in the warning."""
    monkeypatch.setattr("slotmirror.backends.torch_device.backend.REGISTERED_BYTES_MIN", 1 << 16)
    cuda.module.runtime.refuse_after = 0
    buffer = cuda.alloc_host((1 << 17,), torch.uint8, pinned=True)
    assert buffer.pinned is False
    assert "cudaHostRegister of 131072 bytes failed with code 2" in caplog.text


def test_a_refused_unregistration_is_logged_and_harmless(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shutdown on a lost device must still end."""
    monkeypatch.setattr("slotmirror.backends.torch_device.backend.REGISTERED_BYTES_MIN", 1 << 16)
    buffer = cuda.alloc_host((1 << 17,), torch.uint8, pinned=True)
    cuda.stand_in.pinned.registered.clear()
    buffer.close()
    assert "cudaHostUnregister failed with code 713" in caplog.text
    assert cuda.memory_info().pinned_bytes == 0


def test_pages_are_page_locked_and_the_pool_is_not(backend: OnStandIn) -> None:
    """No copy touches the pool: page-locking it would only use up what drivers allow."""
    config = PrefixCacheConfig(num_blocks=64, block_size=16, staging_capacity_tokens=4)
    cache = PrefixCacheManager(config, backend)
    cache.register_policy(ModelCachePolicy())
    cache.preallocate([KeySpec(HIDDEN_KEY, (32,), torch.bfloat16)])
    assert backend.memory_info().pinned_bytes == config.staging_depth * 4 * 64
    cache.shutdown()
    assert backend.memory_info().pinned_bytes == 0
