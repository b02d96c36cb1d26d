"""The rows that the imaginary stage computes: every write of a row has bytes of its own.

Each computed row of a trace has a number, its *stamp*, from 1. Its bytes are a mix of stamp and
key, so a row tells which write it came from: also two writes of the same position of the same
prompt to the same slot differ, which rows made of the prompt alone could not show.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec

Bytes = npt.NDArray[np.uint8]
Stamps = npt.NDArray[np.int64]

NO_ROW = 0
"""The stamp of a row that does not exist and reads zeros (D6)."""

HOST_KEY = "meta"
"""A key that the stage computes on the host, not on the device."""

SPECS: dict[str, KeySpec] = {
    spec.name: spec
    for spec in (
        KeySpec(HIDDEN_KEY, (6,), torch.bfloat16),
        KeySpec("codes.audio", (2,), torch.int64),
        KeySpec("layer", (3,), torch.float32),
        KeySpec("mask", (5, 1), torch.uint8),
        KeySpec(HOST_KEY, (2, 2), torch.int16),
    )
}
"""The keys of the imaginary stage: several dtypes, ranks and odd widths."""

OPTIONAL_KEYS = tuple(name for name in SPECS if name != HIDDEN_KEY)
LEFTOVER_KEY = "leftover"


class RowTable:
    """The bytes of every row of a trace: `table.rows(key, stamps)`; `NO_ROW` gives zeros.

    Made once per trace, by the number of its last stamp; each key's rows when first asked for.
    """

    def __init__(self, last_stamp: int) -> None:
        self._stamps = np.arange(last_stamp + 1, dtype=np.int64)
        self._rows: dict[str, Bytes] = {}

    def rows(self, key: str, stamps: Stamps | Sequence[int]) -> Bytes:
        """Shape `(len(stamps), row_bytes)`."""
        table = self._rows.get(key)
        if table is None:
            table = self._rows[key] = rows_of(key, self._stamps)
        return table[stamps]


def rows_of(key: str, stamps: Stamps) -> Bytes:
    """The bytes of these rows, shape `(len(stamps), row_bytes)`."""
    lanes = np.arange(-(-SPECS[key].row_bytes // 8), dtype=np.uint64)
    seeds = stamps.astype(np.uint64)[:, None] * np.uint64(64) + lanes
    mixed = _mix(seeds ^ np.uint64(_key_seed(key)))
    mixed[stamps == NO_ROW] = 0
    return np.ascontiguousarray(mixed.view(np.uint8)[:, : SPECS[key].row_bytes])


def as_tensor(key: str, rows: Bytes) -> torch.Tensor:
    """Rows as a host tensor of the key's layout; shares their memory."""
    spec = SPECS[key]
    return torch.from_numpy(rows).view(-1).view(spec.dtype).view(-1, *spec.trailing_shape)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A delivered tensor's rows as bytes, shape `(rows, row_bytes)`; at least one row."""
    flat: Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(tensor.shape[0], -1)


@functools.cache
def _key_seed(key: str) -> int:
    return int.from_bytes(key.encode().ljust(8)[:8], "little") ^ (len(key) << 3)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of the splitmix64 generator (S. Vigna's public-domain constants)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
