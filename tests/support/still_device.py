"""A simulated device on which nothing moves unless the test steps a queue."""

from __future__ import annotations

import torch

from slotmirror.conformance.simulated import PROFILES, SimulatedBackend
from slotmirror.core.backend import Fence, HostBuffer


class Still:
    """A pacing under which nothing moves unless the test steps a queue."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def call(self, member: str) -> None:
        pass

    def wait(self, reached: object, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return False


def still(profile: str = "plain") -> SimulatedBackend:
    return SimulatedBackend(profile=PROFILES[profile], pacing=Still())


def run(backend: SimulatedBackend, stream: object) -> None:
    """Step one queue until it is empty or waits."""
    while stream in backend.steppable():
        backend.step(stream)  # type: ignore[arg-type]


def launched(backend: SimulatedBackend, source: torch.Tensor) -> tuple[HostBuffer, Fence, object]:
    """A copy of `source` into a buffer of its own, on a stream of its own."""
    buffer = backend.alloc_host(source.shape, source.dtype, pinned=True)
    fence, stream = backend.new_fence(), backend.new_stream()
    backend.copy_to_host([(source, buffer.tensor)], stream, backend.current_stream(), fence)
    return buffer, fence, stream


def all_bytes(tensor: torch.Tensor) -> set[int]:
    return set(tensor.contiguous().view(-1).view(torch.uint8).tolist())
