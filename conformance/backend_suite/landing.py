"""A place on the host where copies of device tensors land, as a page is one for the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotmirror.conformance.backend_suite.check import require
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench

POISON = 0xA5
GUARD_ROWS = 3


class Landing:
    """Poisoned host buffers for these tensors, a stream and a fence."""

    def __init__(self, bench: Workbench, like: Sequence[torch.Tensor]) -> None:
        self._backend = backend = bench.backend
        pinned = backend.capabilities.pinned_host
        self._buffers = [backend.alloc_host(t.shape, t.dtype, pinned=pinned) for t in like]
        self._sources: Sequence[torch.Tensor] = ()
        self.stream = backend.new_stream()
        self.fence = backend.new_fence()
        for buffer in self._buffers:
            buffer.tensor.view(-1).view(torch.uint8).fill_(POISON)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Where the copies go."""
        return [buffer.tensor for buffer in self._buffers]

    def launch(self, sources: Sequence[torch.Tensor], after: object = None) -> None:
        """Copy the tensors, behind `after` or what the engine's stream has now.

        They are held until the wait, as the core holds what a copy reads.
        """
        self._sources = sources
        after = self._backend.current_stream() if after is None else after
        pairs = list(zip(sources, self.tensors, strict=True))
        self._backend.copy_to_host(pairs, self.stream, after, self.fence)

    def wait(self) -> list[torch.Tensor]:
        """What has landed once the fence was reached; the buffers are given back."""
        require(self.fence.wait(WAIT_S), f"a copy was not over after {WAIT_S:g} s")
        self._sources = ()
        landed = [tensor.clone() for tensor in self.tensors]
        for buffer in self._buffers:
            buffer.close()
        return landed


def fetched(bench: Workbench, tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of a device tensor, through the backend's own copies."""
    landing = Landing(bench, [tensor])
    landing.launch([tensor])
    return landing.wait()[0]
