"""Merged rows on the consumer's device: `materialize(…, device=True)`.

For a next stage on the same machine: the rows go from the output buffer to the device on a stream
of ours, behind one fence. The host side is held until the copy has run; with `pin_outputs` it is
page-locked, and the copy asynchronous.
"""

from __future__ import annotations

from itertools import count

import torch

from slotmirror.core.backend import DeviceBackend, Fence
from slotmirror.core.copy_target import own_stream
from slotmirror.core.oplog import logger


class DeviceOutputs:
    """Copies of outputs on their way to the device. Any thread; no lock: a dict is atomic."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._stream = own_stream(backend)
        self._numbers = count()
        self._running: dict[int, tuple[Fence, torch.Tensor]] = {}

    def send(self, rows: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        """A device copy of these host rows and the fence behind it.

        Raises `NotSupported` for a backend without `device_copies`.
        """
        self.forget_finished()
        copy, fence = self._backend.copy_to_device(rows, self._stream())
        self._running[next(self._numbers)] = fence, rows
        return copy, fence

    def forget_finished(self, timeout_s: float = 0.0) -> bool:
        """Let go of the sources of copies that have run, in their order.

        False if one has not in `timeout_s`; it and those behind it keep their sources. A copy that
        failed has ended too, as its receiver learns from the fence. Two threads may look at the
        same one: it is taken out once.
        """
        for number in list(self._running):
            entry = self._running.get(number)
            try:
                if entry is not None and not entry[0].wait(timeout_s):
                    return False
            except Exception as error:
                logger.error("a copy of outputs to the device failed: %s", error)
            self._running.pop(number, None)
        return True
