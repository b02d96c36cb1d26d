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
    """Open keys by name, in the order of opening.

    The engine thread opens; a key, once open, stays as it is.
    """

    def __init__(self, tables: Tables, plane: DataPlane) -> None:
        self._plane = plane
        self._tables = tables
        self.by_name: dict[str, OpenKey] = {}

    def of(self, rows: Mapping[str, torch.Tensor], deferred: frozenset[str]) -> tuple[OpenKey, ...]:
        """The open keys of these tensors, `(n, *trailing_shape)` each; opens those not seen."""
        keys = self.by_name
        found = tuple([keys[name] for name in rows if name in keys])
        if len(found) == len(rows) and all(
            tensor.dtype == key.spec.dtype and tensor.shape[1:] == key.spec.trailing_shape
            for key, tensor in zip(found, rows.values(), strict=True)
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
        known = {name: key.spec for name, key in self.by_name.items()}
        for spec in specs:
            check_layout(spec, known.setdefault(spec.name, spec))
        fresh = [spec for name, spec in known.items() if name not in self.by_name]
        plane, slots = self._plane, self._tables.slots
        check_limits(plane.config, known.values(), deferred, plane.backend.capabilities)
        for spec in fresh:
            if spec.name in deferred:
                plane.bounces.allocate(spec)
            pool, *pages = self._allocate(spec)
            rows = as_host_rows(pool.tensor)
            page_rows = tuple(map(PageRows, pages))
            targets = (plane.pool, *plane.ring.pages)
            for target, buffer in zip(targets, (pool, *pages), strict=True):
                target.memory[spec.name] = buffer
            index = len(self.by_name)
            room = slots.room_for(index)
            with self._tables.lock:
                if room is not None:
                    slots.widen(room)
                self.by_name[spec.name] = OpenKey(spec, index, pool, rows, page_rows)
        return tuple(self.by_name[spec.name] for spec in specs)

    def _allocate(self, spec: KeySpec) -> list[HostBuffer]:
        """Pool and page buffers of a key, all or none."""
        config, pinned = self._plane.config, self._plane.backend.capabilities.pinned_host
        pages = [(config.staging_capacity_tokens, pinned)] * config.staging_depth
        made: list[HostBuffer] = []
        try:
            for num_rows, pin in [(config.num_slots, config.pin_pool), *pages]:
                shape = (num_rows, *spec.trailing_shape)
                made.append(allocate_host(self._plane.backend, shape, spec.dtype, pinned=pin))
        except BaseException:
            for buffer in made:
                buffer.close()
            raise
        return made
