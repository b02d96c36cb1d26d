"""The kit's workbench over the stand-in: its clock and its long work are virtual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from slotmirror.conformance.backend_suite.workbench import BUSY_S, Workbench
from support.stand_in.backends import OnStandIn


class StandInWorkbench(Workbench):
    """Computes with torch's own operations, as on hardware."""

    def __init__(self, backend: OnStandIn) -> None:
        super().__init__(backend)
        self._device = backend.stand_in
        self._mode = backend.mode

    @property
    def can_be_busy(self) -> bool:
        return True

    def active(self) -> AbstractContextManager[object]:
        return self._mode

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._device.keep_busy(self._device.current("any", 1).queue, BUSY_S)
        yield

    def now(self) -> float:
        return self._device.monotonic()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._device.pinned.holds(tensor)

    def current_device_index(self) -> int | None:
        return self._device.current_index

    def failures(self) -> Mapping[str, Callable[[], None]]:
        def fail_next_copy() -> None:
            self._device.fail_next_copy = True

        return {**super().failures(), "copy_to_host": fail_next_copy}
