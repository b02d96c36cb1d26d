"""Host memory for rows, and views of it as opaque rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend, HostBuffer, HostRows


def allocate_host(
    backend: DeviceBackend, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool
) -> HostBuffer:
    """`backend.alloc_host`, also inside an engine's inference mode.

    A tensor made in inference mode could not be written outside of it, for instance by the mover.
    """
    with torch.inference_mode(False):
        return backend.alloc_host(shape, dtype, pinned=pinned)


def as_host_rows(tensor: torch.Tensor) -> HostRows:
    """A view of a contiguous host tensor, shape `(rows, …)`, as opaque rows; nothing is copied.

    There is at least one row, with bytes in it. The view keeps the tensor's memory alive.
    """
    flat = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, tensor[0].nbytes)))
