"""cpu_ref made asynchronous by hand: copies run, and fences are reached, when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.backend import Capabilities, Fence, Stream


class GatedFence(Fence):
    """Reached once the gate has opened behind the copies recorded before it."""

    def __init__(self, backend: GatedBackend) -> None:
        self._backend = backend
        self.reached_at = 0

    def record(self, stream: Stream) -> None:
        self.reached_at = self._backend.launched

    def wait_on(self, stream: Stream) -> None:
        pass

    def done(self) -> bool:
        if self._backend.lost is not None:
            raise self._backend.lost
        return self._backend.finished >= self.reached_at

    def wait(self, timeout_s: float) -> bool:
        if not self.done():
            self._backend.on_wait(timeout_s)
        return self.done()


class GatedBackend(CpuRefBackend):
    """Queues copies until `finish` runs them; `lost` makes every fence raise.

    `on_wait(timeout_s)` stands for the time that passes in a fence wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0
        self.finished = 0
        self.lost: Exception | None = None
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.on_wait = lambda timeout_s: None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(async_copy=True, pinned_host=False)

    def new_fence(self) -> Fence:
        return GatedFence(self)

    def copy_to_host(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        self._queue.extend(pairs)
        self.launched += len(pairs)
        fence.record(stream)

    def finish(self, copies: int | None = None) -> None:
        """Run the first `copies` queued copies, all by default."""
        count = len(self._queue) if copies is None else copies
        for source, destination in self._queue[:count]:
            destination.copy_(source)
        del self._queue[:count]
        self.finished += count
