"""The CPU reference backend.

Plain and obvious on purpose: every copy is a copy, everything has happened when a call returns,
there are no threads and no streams. Every other backend must match it byte for byte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from slotmirror.core.backend import (
    Capabilities,
    DeviceBackend,
    Fence,
    HostBuffer,
    HostRows,
    Probe,
    SlotIndex,
    Stream,
)


class _ReachedFence(Fence):
    """All work is done when the call that issued it returns, so every fence is reached."""

    def record(self, stream: Stream) -> None:
        pass

    def wait_on(self, stream: Stream) -> None:
        pass

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class _OrdinaryBuffer(HostBuffer):
    """Ordinary, zeroed host memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.tensor = torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        self.pinned = False
        self.reserved_bytes = self.tensor.nbytes

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=self.tensor.dtype, device="cpu")
        self.reserved_bytes = 0


def _copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy into a contiguous tensor of the same shape and dtype."""
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # torch would wake its thread pool, for a copy that one thread does at memory speed.
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        destination.copy_(source.detach())


class CpuRefBackend(DeviceBackend):
    """Host memory as the device; synchronous; always available."""

    name = "cpu_ref"
    device_type = "cpu"
    automatic = True
    accelerator = False

    @classmethod
    def probe(cls) -> Probe:
        return Probe(
            available=True,
            reason="the host's own memory; always there",
            devices=("cpu",),
            versions={"torch": str(torch.__version__), "numpy": np.__version__},
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(async_copy=False, pinned_host=False)

    def bind_thread(self, device: torch.device) -> None:
        pass

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def current_stream(self) -> Stream:
        return None

    def new_stream(self) -> Stream:
        return None

    def new_fence(self) -> Fence:
        return _ReachedFence()

    def alloc_host(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        pinned: bool,
    ) -> HostBuffer:
        return _OrdinaryBuffer(shape, dtype)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def copy_to_host(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        for source, destination in pairs:
            _copy(source, destination)
        fence.record(stream)

    def gather_slots(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        # The plain `out[:] = pool[slots]` without its temporary, which costs more than the rows.
        np.take(pool, slots, out=out, mode="clip")

    def scatter_slots(self, pool: HostRows, slots: SlotIndex, rows: HostRows) -> None:
        pool[slots] = rows
