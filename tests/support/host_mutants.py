"""The cuda backend over the stand-in, each time with one fault of its host memory or row moves."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from slotmirror.backends.torch_device.host_memory import OrdinaryBuffer
from slotmirror.core.backend import HostBuffer
from support.stand_in.backends import StandInCuda


class BufferOver(HostBuffer):
    """A buffer that takes over another's facts."""

    def __init__(self, inner: HostBuffer) -> None:
        self.inner = inner
        self.tensor = inner.tensor
        self.pinned = inner.pinned
        self.reserved_bytes = inner.reserved_bytes

    def close(self):
        self.inner.close()
        self.tensor = self.inner.tensor


class WithOtherBuffers(StandInCuda):
    def alloc_host(self, shape, dtype, *, pinned):
        return self.other(super().alloc_host(shape, dtype, pinned=pinned), shape, dtype, pinned)


class LeaksBuffers(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        buffer.close = lambda: None
        return buffer


class ForgetsToUncount(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        if pinned:
            self._pinned.count(buffer.reserved_bytes)
            buffer._release()
        return buffer


class LiesAboutPinning(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        ordinary = OrdinaryBuffer(shape, dtype)
        ordinary.pinned = pinned
        return ordinary


class ReportsNoRounding(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        over = BufferOver(buffer)
        over.reserved_bytes = buffer.tensor.nbytes - 1
        return over


class Misaligns(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        count = int(np.prod(shape)) * dtype.itemsize
        raw = torch.zeros(count + 128, dtype=torch.uint8)
        over = BufferOver(buffer)
        over.tensor = raw[8 : 8 + count].view(dtype).view(tuple(shape))
        return over


class FollowsTheDefaultDevice(WithOtherBuffers):
    def other(self, buffer, shape, dtype, pinned):
        buffer.tensor = torch.empty(tuple(shape), dtype=dtype)
        return buffer


class SharesBuffers(WithOtherBuffers):
    _memory = torch.zeros(1 << 16, dtype=torch.uint8)

    def other(self, buffer, shape, dtype, pinned):
        count = int(np.prod(shape)) * dtype.itemsize
        if count <= len(self._memory):
            buffer.tensor = self._memory[:count].view(dtype).view(tuple(shape))
        return buffer


class FirstDuplicateWins(StandInCuda):
    def scatter_slots(self, pool, slots, rows):
        pool[slots[::-1]] = rows[::-1]


class RoundsAwayOddWidthsOnReads(StandInCuda):
    def gather_slots(self, pool, slots, out):
        words = pool.itemsize // 8 * 8 or pool.itemsize
        _bytes(out)[:, :words] = _bytes(pool)[slots][:, :words]


class RoundsAwayOddWidthsOnWrites(StandInCuda):
    def scatter_slots(self, pool, slots, rows):
        words = pool.itemsize // 8 * 8 or pool.itemsize
        _bytes(pool)[slots, :words] = _bytes(rows)[:, :words]


class WritesOutOfBounds(StandInCuda):
    def scatter_slots(self, pool, slots, rows):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            ctypes.memmove(pool.ctypes.data + slot * pool.itemsize, row.tobytes(), pool.itemsize)


class LosesTheFirstRowOfReads(StandInCuda):
    def gather_slots(self, pool, slots, out):
        super().gather_slots(pool, slots, out)
        out[:1] = np.zeros((), out.dtype)


class FailsOnNoRows(StandInCuda):
    def gather_slots(self, pool, slots, out):
        if not len(slots):
            raise ValueError("nothing to gather")
        super().gather_slots(pool, slots, out)


def _bytes(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint8).reshape(len(rows), rows.itemsize)
