"""Merged rows on the consumer's device: `materialize(…, device=True)`.

For a next stage on the same machine: the rows go from the output buffer to the device on a stream
of ours, behind one fence. The host side is held until the copy has run; with `pin_outputs` it is
page-locked, and the copy asynchronous.
"""

from __future__ import annotations

from collections import deque

import torch

from slotmirror.core.backend import DeviceBackend, Fence
from slotmirror.core.own_stream import OwnStream


class DeviceOutputs:
    """Copies of outputs on their way to the device. Any thread; no lock: the deque is atomic."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._stream = OwnStream(backend)
        self._running: deque[tuple[Fence, torch.Tensor]] = deque()

    def send(self, rows: torch.Tensor) -> tuple[torch.Tensor, Fence]:
        """A device copy of these host rows and the fence behind it.

        Raises `NotSupported` for a backend without `device_copies`.
        """
        self._forget_finished()
        copy, fence = self._backend.copy_to_device(rows, self._stream.get())
        self._running.append((fence, rows))
        return copy, fence

    def wait(self, timeout_s: float) -> bool:
        """Wait until every copy has run; False if one has not in `timeout_s` each."""
        return all(fence.wait(timeout_s) for fence, _ in list(self._running))

    def _forget_finished(self) -> None:
        # One stream runs them in order, so the first that is not done ends the search.
        while self._running and self._running[0][0].done():
            try:
                self._running.popleft()
            except IndexError:  # another thread was faster
                return
