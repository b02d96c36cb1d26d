"""Views of host tensors as opaque rows."""

from __future__ import annotations

import numpy as np
import torch

from slotmirror.core.backend import HostRows


def as_host_rows(tensor: torch.Tensor) -> HostRows:
    """A view of a contiguous host tensor, shape `(rows, …)`, as opaque rows; nothing is copied.

    The view keeps the tensor's memory alive. Raises `ValueError` for a tensor without row bytes.
    """
    row_bytes = tensor[0].numel() * tensor.itemsize if tensor.shape[0] else 0
    if row_bytes == 0:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no row bytes")
    flat = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, row_bytes)))
