"""Bytes that tell whether they were moved whole: every pattern of every dtype."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import torch

DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
        *("float64", "complex64", "float8_e4m3fn", "float8_e5m2"),
    )
    if hasattr(torch, name)
)
"""Every dtype that an engine may give; NaNs of all payloads and negative zeros are among them."""

WIDTHS_BYTES = (1, 2, 3, 5, 7, 8, 12, 16, 24, 63, 64, 65, 255, 4096)
"""Widths of a row: powers of two, and those that a word-wise kernel would round away."""


def random_rows(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A host tensor whose bytes are drawn from the seed, the dtype's patterns and all."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = bytearray(random.Random(seed).randbytes(num_bytes))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The host tensor's bytes, shape `(nbytes,)`."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
