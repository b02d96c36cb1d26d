"""The imaginary stage: computes rows on the simulated device, always into the same buffers.

Like a captured graph it overwrites its outputs in every forward, and once more right after they
were saved, so that whoever reads them late reads junk (D9).
"""

from __future__ import annotations

from typing import Protocol

import torch

from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.outputs import leftover_values, page_stamps
from slotmirror.conformance.traces.rows import HOST_KEY, SPECS, Bytes, Stamps, as_tensor
from slotmirror.conformance.traces.trace import PADDING_MAX, Trace, TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY

_JUNK = 0x5C


class AnyStage(Protocol):
    """What computes a trace's rows, on whatever device."""

    def forward(self, step: TraceStep) -> tuple[torch.Tensor | None, dict[str, object]]:
        """Run the step; hidden states and the rest, for `save_outputs`."""
        ...

    def overwrite(self) -> None:
        """The next forward begins: nothing of this step's outputs is left."""
        ...

    def wrong_width(self, key: str, num_rows: int) -> torch.Tensor:
        """An output of this key as no step before has had it (D8)."""
        ...


class Stage:
    """Outputs of one engine's steps; engine thread."""

    def __init__(self, backend: SimulatedBackend, trace: Trace) -> None:
        self._backend = backend
        self._rows = trace.rows
        rows_max = trace.config.staging_capacity_tokens + PADDING_MAX
        self._buffers = {
            name: backend.empty((rows_max, *spec.trailing_shape), spec.dtype)
            for name, spec in SPECS.items()
            if name != HOST_KEY
        }
        self._host: list[Bytes] = []

    def forward(self, step: TraceStep) -> tuple[torch.Tensor | None, dict[str, object]]:
        """Queue the step's kernels; returns hidden states and the rest, for `save_outputs`."""
        stamps = page_stamps(step)
        outputs: dict[str, object] = {}
        for key in step.keys:
            rows = self._rows.rows(key, stamps)
            if key == HOST_KEY:
                self._host.append(rows)
                outputs[key] = as_tensor(key, rows)
                continue
            outputs[key] = self._buffers[key][: len(rows) + step.padding_of(key)]
            self._backend.overwrite(self._buffers[key][: len(rows)], rows)
        if step.leftover:
            outputs.update(self._leftovers(stamps))
        hidden = outputs.pop(HIDDEN_KEY, None)
        return hidden if isinstance(hidden, torch.Tensor) else None, outputs

    def _leftovers(self, stamps: Stamps) -> dict[str, object]:
        return {
            name: self._backend.upload(value) if isinstance(value, torch.Tensor) else value
            for name, value in leftover_values(stamps).items()
        }

    def overwrite(self) -> None:
        """The next forward begins: nothing of this step's outputs is left."""
        for buffer in self._buffers.values():
            self._backend.fill(buffer, _JUNK)
        for rows in self._host:
            rows.fill(_JUNK)
        self._host.clear()

    def wrong_width(self, key: str, num_rows: int) -> torch.Tensor:
        """An output of this key as no step before has had it (D8)."""
        spec = SPECS[key]
        return self._backend.empty((num_rows, *spec.trailing_shape, 2), spec.dtype)
