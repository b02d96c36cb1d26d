"""The workbench of the simulated device: its queues are stepped, its memory is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from slotmirror.conformance.backend_suite.values import bytes_of
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.simulated import FaultKind, SimulatedBackend

_FAULTS = {
    "alloc_host": FaultKind.ALLOCATION,
    "snapshot": FaultKind.SNAPSHOT,
    "copy_to_host": FaultKind.COPY_LAUNCH,
    "gather_slots": FaultKind.POOL_READ,
    "scatter_slots": FaultKind.POOL_WRITE,
}


class SimulatedWorkbench(Workbench):
    """Computes by what the simulated backend offers to engines."""

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__(backend)
        self._device = backend
        self._held = False
        self._bytes: dict[int, torch.Tensor] = {}

    @property
    def can_be_busy(self) -> bool:
        return True

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        tensor = self._device.upload(values)
        self._bytes[tensor.data_ptr()] = bytes_of(values).clone()
        fence = self._device.new_fence()
        fence.record(self._device.engine_stream)
        fence.wait(1.0)
        return tensor

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        self._device.overwrite(tensor, self._bytes[values.data_ptr()].numpy())

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The engine's stream stands still until the block is left."""
        self._held = True
        self._device.engine_stream.append(lambda: None, lambda: not self._held)
        try:
            yield
        finally:
            self._held = False

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._device.profile.pinned_host

    def failures(self) -> Mapping[str, Callable[[], None]]:
        return {name: self._arm(kind) for name, kind in _FAULTS.items()}

    def violations(self) -> list[str]:
        return list(self._device.violations)

    def _arm(self, kind: FaultKind) -> Callable[[], None]:
        return lambda: self._device.faults.arm(kind, 1)
