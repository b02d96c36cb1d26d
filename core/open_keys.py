"""The keys that have rows, opened when first seen or ahead of time (D7, M1, M2).

The pool is ordinary memory unless `pin_pool` is set, since no device copy touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slotmirror.core.backend import HostBuffer
from slotmirror.core.block_pool import OpenKey, PageRows
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.host_rows import allocate_host, as_host_rows
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.memory_plan import check_limits
from slotmirror.core.split import check_layout
from slotmirror.core.tables import Tables


class OpenKeys:
    """Open keys by name. The engine thread opens; a key, once open, stays as it is."""

    def __init__(self, tables: Tables, plane: DataPlane) -> None:
        self._plane = plane
        self._tables = tables
        self._keys: dict[str, OpenKey] = {}

    def of(self, rows: Mapping[str, torch.Tensor], deferred: frozenset[str]) -> tuple[OpenKey, ...]:
        """The open keys of these tensors, `(n, *trailing_shape)` each; opens those not seen."""
        keys = self._keys
        found = tuple([keys[name] for name in rows if name in keys])
        if len(found) == len(rows) and all(
            key.fits(tensor) for key, tensor in zip(found, rows.values(), strict=True)
        ):
            return found
        return self.open([KeySpec.of(name, tensor) for name, tensor in rows.items()], deferred)

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
        fresh = [spec for name, spec in known.items() if name not in self._keys]
        plane, slots = self._plane, self._tables.slots
        check_limits(plane.config, known.values(), deferred, plane.backend.capabilities)
        for spec in fresh:
            if spec.name in deferred:
                plane.bounces.allocate(spec)
            pool, *pages = self._allocate(spec)
            rows = as_host_rows(pool.tensor)
            page_rows = tuple(map(PageRows, pages))
            for page, buffer in zip(plane.ring.pages, pages, strict=True):
                page.memory[spec.name] = buffer
            index = len(self._keys)
            room = slots.room_for(index)
            with self._tables.lock:
                if room is not None:
                    slots.widen(room)
                self._keys[spec.name] = OpenKey(spec, index, pool, rows, page_rows)
        return tuple(self._keys[spec.name] for spec in specs)

    def _allocate(self, spec: KeySpec) -> list[HostBuffer]:
        """Pool and page buffers of a key, all or none."""
        config = self._plane.config
        wanted = [(config.num_slots, config.pin_pool)]
        pinned = self._plane.backend.capabilities.pinned_host
        wanted += [(config.staging_capacity_tokens, pinned)] * config.staging_depth
        made: list[HostBuffer] = []
        try:
            for num_rows, pin in wanted:
                shape = (num_rows, *spec.trailing_shape)
                made.append(allocate_host(self._plane.backend, shape, spec.dtype, pinned=pin))
        except BaseException:
            for buffer in made:
                buffer.close()
            raise
        return made

    def get(self, name: str) -> OpenKey | None:
        """The open key of this name."""
        return self._keys.get(name)

    def all(self) -> tuple[OpenKey, ...]:
        """Every open key, in the order of opening."""
        return tuple(self._keys.values())

    @property
    def pool_bytes_by_key(self) -> dict[str, int]:
        """Host bytes of each key's durable rows, allocator rounding included."""
        return {key.name: key.pool.reserved_bytes for key in self.all() if key.pool.reserved_bytes}

    def close(self) -> None:
        """Give the pool's memory back; nobody may still move rows."""
        for key in self.all():
            key.pool.close()
