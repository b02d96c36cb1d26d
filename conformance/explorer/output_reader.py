"""Outputs that a builder reads later: what it holds must stay as it was delivered (M3)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slotmirror.conformance.explorer.faults import Judge
from slotmirror.conformance.traces.delivery_check import DeliveryCheck
from slotmirror.conformance.traces.plain_model import WrongDelivery
from slotmirror.conformance.traces.rows import Bytes
from slotmirror.core.backend import Fence

_ARRIVAL_S = 10_000.0
_ARRIVAL_WAITS = 20


class OutputReader:
    """Compares the bytes of outputs on the host, or on the device behind their fence."""

    def __init__(self, judge: Judge, read_device: Callable[[torch.Tensor], Bytes | None]) -> None:
        """`read_device` gives a device tensor's present bytes, None for a tensor elsewhere."""
        self._read_device = read_device
        self._judge = judge
        self._later: list[tuple[DeliveryCheck, Fence | None]] = []

    def __len__(self) -> int:
        """Outputs that are still to be read."""
        return len(self._later)

    def put(self, check: DeliveryCheck, arrival: Fence | None) -> None:
        """Remember an output; `arrival` is the fence behind its copy to the device, if it has one.

        The check has noted what was delivered, and holds the tensors.
        """
        self._later.append((check, arrival))

    def read(self, left: int = 0) -> int:
        """Read the oldest until so many are left; returns the rows that were read on the device."""
        on_device = 0
        while len(self._later) > left:
            check, arrival = self._later.pop(0)
            if arrival is None:
                check.compare()
            elif self._arrived(arrival):
                on_device += check.compare(self._device_bytes)
        return on_device

    def forget(self) -> None:
        """The builder dies: nobody reads the rest."""
        self._later.clear()

    def _arrived(self, arrival: Fence) -> bool:
        """Wait for the fence; False where the run's fault explains that it cannot be waited for."""
        try:
            # Where the clock runs ahead a wait may end too early, but not again and again.
            if any(arrival.wait(_ARRIVAL_S) for _ in range(_ARRIVAL_WAITS)):
                return True
        except Exception as error:
            self._judge.judge(error)
            return False
        raise WrongDelivery("rows never arrive on the device")

    def _device_bytes(self, tensor: torch.Tensor) -> Bytes:
        found = self._read_device(tensor)
        if found is None:
            raise WrongDelivery("rows that were wanted on the device lie elsewhere")
        return found
