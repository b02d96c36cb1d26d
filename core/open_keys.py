"""The keys that have rows, opened when first seen or ahead of time (D7, M1, M2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slotmirror.core.block_pool import BlockPool, OpenKey
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.deferred_write import BounceBuffers
from slotmirror.core.host_rows import as_host_rows
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.memory_plan import check_limit
from slotmirror.core.runtime import Lock
from slotmirror.core.slot_table import SlotTable
from slotmirror.core.split import check_layout
from slotmirror.core.staging import StagingRing


class OpenKeys:
    """Open keys by name. The engine thread opens; a key, once open, stays as it is."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        pool: BlockPool,
        ring: StagingRing,
        bounces: BounceBuffers,
        slots: SlotTable,
        manager_lock: Lock,
    ) -> None:
        self._config = config
        self._pool = pool
        self._ring = ring
        self._bounces = bounces
        self._slots = slots
        self._lock = manager_lock
        self._keys: dict[str, OpenKey] = {}

    def open(
        self, specs: Iterable[KeySpec], deferred: frozenset[str] = frozenset()
    ) -> tuple[OpenKey, ...]:
        """The open keys of these layouts; those not seen before are allocated and published.

        `deferred` names those that are written through bounce buffers. Takes the manager lock to
        publish, not while it allocates. Raises `KeyLayoutError` (D8), `HostMemoryLimitError`
        (M1) and, for a deferred row larger than a bounce buffer, `ConfigError`; nothing is open
        then that was not before.
        """
        specs = tuple(specs)
        known = {name: key.spec for name, key in self._keys.items()}
        for spec in specs:
            check_layout(spec, known.setdefault(spec.name, spec))
        fresh = [spec for spec in dict.fromkeys(specs) if spec.name not in self._keys]
        if fresh:
            every = [*(key.spec for key in self._keys.values()), *fresh]
            check_limit(self._config, every, deferred)
        for spec in fresh:
            if spec.name in deferred:
                self._bounces.allocate(spec)
            tensor = self._allocate(spec)
            rows = as_host_rows(tensor)
            room = self._slots.room_for_a_key()
            with self._lock:
                index = self._slots.open_key(room)
                self._keys[spec.name] = OpenKey(spec, index, tensor, rows)
        return tuple(self._keys[spec.name] for spec in specs)

    def _allocate(self, spec: KeySpec) -> torch.Tensor:
        """Pool and page buffers of a key, all or none: a later layout must find nothing here."""
        try:
            tensor = self._pool.allocate(spec)
            self._ring.open_key(spec)
        except BaseException:
            self._ring.forget_key(spec)
            self._pool.forget(spec)
            raise
        return tensor

    def get(self, name: str) -> OpenKey | None:
        """The open key of this name."""
        return self._keys.get(name)

    def all(self) -> tuple[OpenKey, ...]:
        """Every open key, in the order of opening."""
        return tuple(self._keys.values())
