"""The imaginary stage on a device that torch drives: always into the same buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.explorer.stage import AnyStage, Stage
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.rows import Bytes, as_tensor, bytes_of
from slotmirror.conformance.traces.trace import Trace
from slotmirror.core.backend import DeviceBackend


class TorchStage(AnyStage):
    """A stage on a device that torch drives."""

    def __init__(self, bench: Workbench, trace: Trace) -> None:
        self._bench = bench
        super().__init__(trace)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._bench.backend.device)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return self._bench.tensor(values)

    def write(self, target: torch.Tensor, key: str, rows: Bytes) -> None:
        self._bench.write(target, self._bench.tensor(as_tensor(key, rows)))

    def fill(self, buffer: torch.Tensor, byte: int) -> None:
        buffer.view(-1).view(torch.uint8).fill_(byte)


class SoakDevice:
    """One backend as the soak uses it: a stage for each trace, and a look at device tensors."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self._bench = None if isinstance(backend, SimulatedBackend) else Workbench(backend)

    def stage(self, trace: Trace) -> AnyStage:
        """What computes the trace's rows."""
        if self._bench is not None:
            return TorchStage(self._bench, trace)
        assert isinstance(self.backend, SimulatedBackend)
        return Stage(self.backend, trace)

    def read(self, tensor: torch.Tensor) -> Bytes | None:
        """The bytes of a device tensor that has arrived; None for a tensor elsewhere."""
        if isinstance(self.backend, SimulatedBackend):
            return self.backend.bytes_on_device(tensor)
        if not self.backend.owns(tensor):
            return None
        return np.array(bytes_of(tensor.cpu()))

    def violations(self) -> list[str]:
        """What the device saw done against its rules."""
        return self.backend.violations if isinstance(self.backend, SimulatedBackend) else []
