"""The imaginary stage: computes rows on some device, always into the same buffers.

Like a captured graph it overwrites its outputs in every forward, and once more right after they
were saved, so that whoever reads them late reads junk (D9).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.outputs import leftover_values, page_stamps
from slotmirror.conformance.traces.rows import HOST_KEY, SPECS, Bytes, as_tensor
from slotmirror.conformance.traces.trace import PADDING_MAX, Trace, TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY

_JUNK = 0x5C


class AnyStage(ABC):
    """Outputs of one engine's steps, on whatever device; engine thread.

    A subclass is ready to serve `empty` before it calls `__init__`.
    """

    def __init__(self, trace: Trace) -> None:
        self._rows = trace.rows
        rows_max = trace.config.staging_capacity_tokens + PADDING_MAX
        self._buffers = {
            name: self.empty((rows_max, *spec.trailing_shape), spec.dtype)
            for name, spec in SPECS.items()
            if name != HOST_KEY
        }
        self._host: list[Bytes] = []

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A device tensor."""

    @abstractmethod
    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor with these values."""

    @abstractmethod
    def write(self, target: torch.Tensor, key: str, rows: Bytes) -> None:
        """Let the device compute these rows of the key into `target`."""

    @abstractmethod
    def fill(self, buffer: torch.Tensor, byte: int) -> None:
        """Let the device set every byte of a contiguous tensor."""

    def forward(self, step: TraceStep) -> tuple[torch.Tensor | None, dict[str, object]]:
        """Run the step; hidden states and the rest, for `save_outputs`."""
        stamps = page_stamps(step)
        outputs: dict[str, object] = {}
        for key in step.keys:
            rows = self._rows.rows(key, stamps)
            if key == HOST_KEY:
                self._host.append(rows)
                outputs[key] = as_tensor(key, rows)
                continue
            outputs[key] = self._buffers[key][: len(rows) + step.padding_of(key)]
            self.write(self._buffers[key][: len(rows)], key, rows)
        if step.leftover:
            for name, value in leftover_values(stamps).items():
                outputs[name] = self.upload(value) if isinstance(value, torch.Tensor) else value
        hidden = outputs.pop(HIDDEN_KEY, None)
        return hidden if isinstance(hidden, torch.Tensor) else None, outputs

    def overwrite(self) -> None:
        """The next forward begins: nothing of this step's outputs is left."""
        for buffer in self._buffers.values():
            self.fill(buffer, _JUNK)
        for rows in self._host:
            rows.fill(_JUNK)
        self._host.clear()

    def wrong_width(self, key: str, num_rows: int) -> torch.Tensor:
        """An output of this key as no step before has had it (D8)."""
        spec = SPECS[key]
        return self.empty((num_rows, *spec.trailing_shape, 2), spec.dtype)


class Stage(AnyStage):
    """A stage on the simulated device, whose kernels are queued."""

    def __init__(self, backend: SimulatedBackend, trace: Trace) -> None:
        self._backend = backend
        super().__init__(trace)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._backend.empty(shape, dtype)

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        return self._backend.upload(values)

    def write(self, target: torch.Tensor, key: str, rows: Bytes) -> None:
        self._backend.overwrite(target, rows)

    def fill(self, buffer: torch.Tensor, byte: int) -> None:
        self._backend.fill(buffer, byte)
