"""Saving a step: split, reserve, stage, then one change of the tables and one append.

Everything that can fail happens before the first table is changed; what changes tables cannot
raise. A save that fails leaves its step open, to be saved again (C3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotmirror.core.data_plane import DataPlane
from slotmirror.core.errors import KeyLayoutError, StepTooLargeError
from slotmirror.core.layout import check_counts, ordered_slots, row_order
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.open_keys import OpenKeys
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.split import split_outputs
from slotmirror.core.staging import StagingPage
from slotmirror.core.step import Step
from slotmirror.core.tables import Tables


class StepSaver:
    """The save's side of a manager. Engine thread; takes the manager lock to commit."""

    def __init__(self, tables: Tables, plane: DataPlane, keys: OpenKeys) -> None:
        self._tables = tables
        self._plane = plane
        self._keys = keys

    def save(
        self,
        policy: ModelCachePolicy,
        step: Step,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, object],
        counts: tuple[int, int],
        req_ids: Sequence[str] | None,
    ) -> None:
        """Save an open step; `counts` are its unpadded and padded tokens."""
        check_counts(step.events, *counts)
        if counts[0] > self._plane.config.staging_capacity_tokens:
            raise StepTooLargeError(counts[0], self._plane.config.staging_capacity_tokens)
        step.order = row_order(step.events, req_ids)
        rows, leftovers = split_outputs(hidden, mm_outputs, counts, policy)
        pack = self._pack(step, leftovers) if leftovers else None
        step.saved_keys = self._keys.of(rows, policy.deferred_keys)
        backend, names = self._plane.backend, policy.deferred_keys
        # What lies on the host cannot be deferred: the engine may overwrite it at once.
        deferred = frozenset(n for n in names if n in rows and backend.owns(rows[n]))
        reserved = self._reserve(rows, deferred) if deferred else 0
        try:
            page, sources = self._plane.ring.stage(
                step.saved_keys, tuple(rows.values()), deferred, pack, counts[0]
            )
            try:
                self._commit(step, pack, deferred, page, sources, reserved)
            except BaseException:
                self._plane.ring.give_up(page, "a save that was given up")
                raise
        except BaseException:
            self._plane.budget.release(reserved)
            raise

    def close_batch(self, reason: str) -> None:
        """Append the open batch as one write, if there is one, for this reason (W2).

        Caller holds manager lock.
        """
        if self._tables.deferred.num_bytes:
            batch = self._tables.deferred.close(reason)
            self._plane.log.append([self._plane.deferred_write_of(batch)])

    def _commit(
        self,
        step: Step,
        pack: LeftoverPack | None,
        deferred: frozenset[str],
        page: StagingPage,
        sources: Sequence[torch.Tensor],
        reserved: int,
    ) -> None:
        """The step takes over its page, its rows become present, its write is appended."""
        slots = ordered_slots(step.events, step.order)
        by_key = dict(zip(step.saved_keys, sources, strict=False))
        candidates = step.saved_keys if deferred else ()
        clones = {key: by_key.pop(key) for key in candidates if key.name in deferred}
        write = self._plane.write_of(step.step_id, by_key, page, slots)
        late = () if self._plane.config.prefetch else step.gathers.values()
        tables = self._tables
        with tables.lock:
            tables.check_open()
            step.page, step.leftovers = page, pack
            # The step's hold is the save's; nobody else knows of the page before the append.
            page.holds += len(write)
            tables.registry.note_saved(step.owners, step.ends, step.replays)
            step.delivered_before = tables.registry.delivered_ends(step.owners)
            self._plane.log.append([*late, *write])
            if step.epoch != tables.epoch:
                # Rows of a step that was open at a reset are not kept (R1).
                self._plane.budget.release(reserved)
            else:
                tables.slots.mark_written(slots, tuple([key.index for key in step.saved_keys]))
                if clones:
                    tables.deferred.add(clones, slots, step.events.req_ids)
                    if self._plane.budget.is_half_full(tables.deferred.num_bytes):
                        self.close_batch("budget")
            tables.open_step = None
            tables.drafted = step if len(step.drafted) else None
            tables.steps.add(step)

    def _pack(self, step: Step, found: Mapping[str, object]) -> LeftoverPack | None:
        """The leftovers to deliver: a known key that is None this time is simply omitted (D6)."""
        leftovers = {
            name: value
            for name, value in found.items()
            if value is not None or name not in self._keys.by_name
        }
        hidden_rows = sorted(leftovers.keys() & step.gathers.keys())
        if hidden_rows:
            raise KeyLayoutError(
                f"keys {hidden_rows} have hit rows to deliver in this step, but their value in it "
                "is not per-token: save the step without them"
            )
        return LeftoverPack(leftovers) if leftovers else None

    def _reserve(self, rows: Mapping[str, torch.Tensor], deferred: frozenset[str]) -> int:
        """Reserve device bytes for this step's deferred clones, before they are made (W4)."""
        num_bytes = sum(rows[name].nbytes for name in deferred)
        if not self._plane.budget.fits(num_bytes):
            with self._tables.lock:
                self.close_batch("budget")
            self._plane.committer.kick()
        self._plane.budget.reserve(num_bytes)
        return num_bytes
