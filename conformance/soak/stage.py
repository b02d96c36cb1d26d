"""The imaginary stage on a device that torch drives: always into the same buffers."""

from __future__ import annotations

import numpy as np
import torch

from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.explorer.stage import AnyStage, Stage
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.outputs import leftover_values, page_stamps
from slotmirror.conformance.traces.rows import HOST_KEY, SPECS, Bytes, as_tensor, bytes_of
from slotmirror.conformance.traces.trace import PADDING_MAX, Trace, TraceStep
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.key_spec import HIDDEN_KEY

_JUNK = 0x5C


class TorchStage:
    """Outputs of one engine's steps; engine thread. What it saved is junk right afterwards (D9)."""

    def __init__(self, bench: Workbench, trace: Trace) -> None:
        self._bench = bench
        self._rows = trace.rows
        rows_max = trace.config.staging_capacity_tokens + PADDING_MAX
        device = bench.backend.device
        self._buffers = {
            name: torch.empty((rows_max, *spec.trailing_shape), dtype=spec.dtype, device=device)
            for name, spec in SPECS.items()
            if name != HOST_KEY
        }
        self._host: list[Bytes] = []

    def forward(self, step: TraceStep) -> tuple[torch.Tensor | None, dict[str, object]]:
        stamps = page_stamps(step)
        outputs: dict[str, object] = {}
        for key in step.keys:
            rows = self._rows.rows(key, stamps)
            if key == HOST_KEY:
                self._host.append(rows)
                outputs[key] = as_tensor(key, rows)
                continue
            buffer = self._buffers[key]
            self._bench.write(buffer[: len(rows)], self._bench.tensor(as_tensor(key, rows)))
            outputs[key] = buffer[: len(rows) + step.padding_of(key)]
        if step.leftover:
            for name, value in leftover_values(stamps).items():
                if isinstance(value, torch.Tensor):
                    outputs[name] = self._bench.tensor(value)
                else:
                    outputs[name] = value
        hidden = outputs.pop(HIDDEN_KEY, None)
        return hidden if isinstance(hidden, torch.Tensor) else None, outputs

    def overwrite(self) -> None:
        for buffer in self._buffers.values():
            buffer.view(-1).view(torch.uint8).fill_(_JUNK)
        for rows in self._host:
            rows.fill(_JUNK)
        self._host.clear()

    def wrong_width(self, key: str, num_rows: int) -> torch.Tensor:
        spec = SPECS[key]
        shape = (num_rows, *spec.trailing_shape, 2)
        return torch.empty(shape, dtype=spec.dtype, device=self._bench.backend.device)


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
