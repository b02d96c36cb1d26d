"""Host memory of a torch device: aligned, page-locked where asked and possible, truly sized."""

from __future__ import annotations

import mmap
import os
import re
import weakref
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.core.backend import HostBuffer

ALIGNMENT_BYTES = 64
"""Of addresses and sizes: Ascend asks for 64, torch's host allocators give it anyway."""

_MAPPED_BYTES_MIN = 2 << 20
"""A huge page: from here on ordinary memory is mapped by itself."""

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
_ROUND_THRESHOLD = re.compile(r"pinned_max_round_threshold_mb:(\d+)")


class PinnedMeter:
    """Page-locked bytes of all open buffers. Any thread; finalisers too, so it takes no lock."""

    def __init__(self) -> None:
        self._taken: dict[object, int] = {}

    def count(self, num_bytes: int) -> Callable[[], object]:
        """Count `num_bytes` until the returned function is called, once or more."""
        key = object()
        self._taken[key] = num_bytes
        return lambda: self._taken.pop(key, None)

    @property
    def num_bytes(self) -> int:
        """The sum."""
        return sum(list(self._taken.values()))


class OrdinaryBuffer(HostBuffer):
    """Pageable memory, uninitialised; large buffers in huge pages where the kernel has them."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        num_bytes = aligned_bytes(shape, dtype)
        large = num_bytes >= _MAPPED_BYTES_MIN
        memory = torch.from_numpy(mapped(num_bytes)) if large else host_bytes(num_bytes)
        self.tensor = shaped(memory, shape, dtype)
        self.pinned = False
        self.reserved_bytes = len(memory)

    def close(self) -> None:
        self.tensor = host_bytes(0).view(self.tensor.dtype)
        self.reserved_bytes = 0


class PinnedBuffer(HostBuffer):
    """Memory of torch's own page-locked allocator, which keeps it for others after `close`.

    Raises what the allocator raises: `RuntimeError` where nothing can be page-locked.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, meter: PinnedMeter) -> None:
        num_bytes = aligned_bytes(shape, dtype)
        self.tensor = shaped(host_bytes(num_bytes, pin_memory=True), shape, dtype)
        self.pinned = True
        self.reserved_bytes = torch_pinned_bytes(num_bytes)
        # An owner may keep a view alone and never call `close`; views share the storage.
        storage = self.tensor.untyped_storage()
        self._release = weakref.finalize(storage, meter.count(self.reserved_bytes))
        self._release.atexit = False

    def close(self) -> None:
        self._release()
        self.tensor = host_bytes(0).view(self.tensor.dtype)
        self.reserved_bytes = 0


def aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of such a tensor, rounded up to the alignment; never 0."""
    num_bytes = max(prod(shape) * dtype.itemsize, 1)
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def torch_pinned_bytes(num_bytes: int) -> int:
    """What torch's page-locked allocator takes for `num_bytes`: the next power of two.

    Unless `pinned_max_round_threshold_mb` is set, and they are more than that.
    """
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR_SETTINGS)
    threshold = _ROUND_THRESHOLD.search(settings)
    if threshold is not None and num_bytes > int(threshold[1]) << 20:
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def host_bytes(num_bytes: int, *, pin_memory: bool = False) -> torch.Tensor:
    """Uninitialised host memory, whatever default device the engine has set while it loads."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)


def mapped(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Whole pages of private memory, zero, untouched until used; unmapped with its last view."""
    pages = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=np.uint8)


def shaped(memory: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of `memory` as a tensor."""
    num_bytes = prod(shape) * dtype.itemsize
    return memory[:num_bytes].view(dtype).view(tuple(shape))
