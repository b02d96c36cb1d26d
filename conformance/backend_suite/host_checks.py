"""Host buffers: layout, alignment, the truth about page-locking, and giving back."""

from __future__ import annotations

from math import prod

import torch

from slotmirror.conformance.backend_suite.check import checks_of, require, require_bytes
from slotmirror.conformance.backend_suite.values import DTYPES, random_rows
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.core.backend import HostBuffer

_SHAPES = ((1,), (7,), (64, 3), (5, 2, 9), (1024, 33), (3, 1 << 20))


def host_buffers_have_the_layout_asked_for(bench: Workbench) -> None:
    """Shape, dtype, contiguous, on the host, writable, at least as large as the tensor."""
    for dtype in DTYPES:
        for pinned in (False, True):
            buffer = bench.backend.alloc_host((5, 3), dtype, pinned=pinned)
            tensor = buffer.tensor
            require(tensor.shape == (5, 3) and tensor.dtype == dtype, f"{tensor.dtype}: layout")
            require(tensor.is_contiguous(), "a host buffer is not contiguous")
            require(tensor.device.type == "cpu", f"a host buffer lies on {tensor.device}")
            values = random_rows((5, 3), dtype, seed=30)
            tensor.copy_(values)
            require_bytes(tensor, values, "what was written into a host buffer")
            buffer.close()


def host_buffers_lie_on_the_host_whatever_the_default_device(bench: Workbench) -> None:
    """Engines set torch's default device while they load; pages are opened then, too."""
    for default in ("meta", bench.backend.device):
        with torch.device(default):
            for pinned in (False, True):
                buffer = bench.backend.alloc_host((100,), torch.uint8, pinned=pinned)
                found = buffer.tensor.device.type
                require(found == "cpu", f"under default device {default} a buffer is on {found}")
                buffer.close()


def host_buffers_are_aligned(bench: Workbench) -> None:
    """Every address is a multiple of `host_alignment_bytes`, odd sizes before it or not."""
    alignment = bench.backend.capabilities.host_alignment_bytes
    held = []
    for shape in _SHAPES:
        for pinned in (False, True):
            held.append(bench.backend.alloc_host(shape, torch.uint8, pinned=pinned))
            address = held[-1].tensor.data_ptr()
            require(address % alignment == 0, f"address {address:#x}, alignment {alignment}")
    for buffer in held:
        buffer.close()


def page_locking_is_declared_truly(bench: Workbench) -> None:
    """`pinned` says what was got: what the device's runtime says, what capabilities declare."""
    backend = bench.backend
    ordinary = backend.alloc_host((1000,), torch.uint8, pinned=False)
    require(not ordinary.pinned, "memory that was not to be page-locked says it is")
    locked = backend.alloc_host((1000,), torch.uint8, pinned=True)
    declared = backend.capabilities.pinned_host
    require(locked.pinned == declared, f"pinned_host is {declared}, got pinned={locked.pinned}")
    if locked.pinned:
        require(bench.is_pinned(locked.tensor), "memory that says it is page-locked is not")
    for buffer in (ordinary, locked):
        buffer.close()


def page_locked_bytes_are_counted(bench: Workbench) -> None:
    """`pinned_bytes` grows by what open buffers really took and shrinks when they are closed."""
    backend = bench.backend
    before = backend.memory_info().pinned_bytes
    buffers = [backend.alloc_host((size,), torch.uint8, pinned=True) for size in (1, 1000, 5000)]
    taken = sum(buffer.reserved_bytes for buffer in buffers if buffer.pinned)
    counted = backend.memory_info().pinned_bytes - before
    require(counted == taken, f"{counted} page-locked bytes counted, {taken} taken")
    for buffer in buffers:
        buffer.close()
    left = backend.memory_info().pinned_bytes - before
    require(left == 0, f"{left} page-locked bytes are left after the buffers were closed")


def reserved_bytes_cover_the_tensor(bench: Workbench) -> None:
    """`reserved_bytes` is what was really taken, rounding included: never less than the tensor."""
    for shape in _SHAPES:
        for pinned in (False, True):
            buffer = bench.backend.alloc_host(shape, torch.uint8, pinned=pinned)
            reserved = buffer.reserved_bytes
            require(reserved >= prod(shape), f"{reserved} bytes reserved for {prod(shape)}")
            buffer.close()


def close_gives_the_memory_back(bench: Workbench) -> None:
    """After `close` the buffer holds no memory; a second `close` is harmless."""
    for pinned in (False, True):
        buffer: HostBuffer = bench.backend.alloc_host((1 << 20,), torch.uint8, pinned=pinned)
        buffer.close()
        buffer.close()
        require(buffer.tensor.numel() == 0, "a closed buffer still holds its memory")


def buffers_do_not_overlap(bench: Workbench) -> None:
    """Two open buffers never share memory."""
    backend = bench.backend
    buffers = [
        backend.alloc_host((size,), torch.uint8, pinned=pinned)
        for size in (1, 63, 64, 1000)
        for pinned in (False, True)
    ]
    for number, buffer in enumerate(buffers):
        buffer.tensor.fill_(number)
    for number, buffer in enumerate(buffers):
        require(bool((buffer.tensor == number).all()), "two open buffers share memory")
        buffer.close()


HOST_CHECKS = checks_of(
    host_buffers_have_the_layout_asked_for,
    host_buffers_lie_on_the_host_whatever_the_default_device,
    host_buffers_are_aligned,
    page_locking_is_declared_truly,
    page_locked_bytes_are_counted,
    reserved_bytes_cover_the_tensor,
    close_gives_the_memory_back,
    buffers_do_not_overlap,
)
