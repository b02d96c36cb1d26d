"""The durable rows: for each key one host tensor with a row per KV slot (K3).

Only the committer reads or writes rows; the tensors are ordinary memory unless `pin_pool` is set,
since no device copy touches them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slotmirror.core.backend import DeviceBackend, HostBuffer, HostRows
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.host_rows import allocate_host
from slotmirror.core.key_spec import KeySpec


@dataclass(frozen=True, slots=True, eq=False)
class OpenKey:
    """A key that has rows.

    `index` is its column in the slot table. For the mover: `tensor` is its
    `(num_slots, *trailing_shape)` memory, `rows` the same as `(num_slots,)` opaque rows.
    """

    spec: KeySpec
    index: int
    tensor: torch.Tensor
    rows: HostRows


class BlockPool:
    """Rows of all open keys. The engine thread opens keys; the committer moves rows."""

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        self._config = config
        self._backend = backend
        self._buffers: dict[str, HostBuffer] = {}

    def allocate(self, spec: KeySpec) -> torch.Tensor:
        """Memory for `num_slots` rows of the key; repeated calls give the same."""
        if spec.name not in self._buffers:
            self._buffers[spec.name] = allocate_host(
                self._backend,
                (self._config.num_slots, *spec.trailing_shape),
                spec.dtype,
                pinned=self._config.pin_pool,
            )
        return self._buffers[spec.name].tensor

    def forget(self, spec: KeySpec) -> None:
        """Give back the memory of a key that was not opened after all."""
        buffer = self._buffers.pop(spec.name, None)
        if buffer is not None:
            buffer.close()

    @property
    def bytes_by_key(self) -> dict[str, int]:
        """Host bytes of each key's rows, allocator rounding included."""
        return {name: buffer.reserved_bytes for name, buffer in list(self._buffers.items())}

    def close(self) -> None:
        """Give the memory back; nobody may still move rows."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
