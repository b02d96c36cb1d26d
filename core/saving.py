"""Saving a step: split, reserve, stage, then one change of the tables and one append.

Everything that can fail happens before the first table is changed; what changes tables cannot
raise. A save that fails leaves its step open, to be saved again (C3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.errors import KeyLayoutError
from slotmirror.core.events import Int64Array
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.open_keys import OpenKeys
from slotmirror.core.oplog import Operation
from slotmirror.core.page_transfer import StagedStep
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.split import SplitOutputs, split_outputs
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import Step
from slotmirror.core.tables import Tables


class StepSaver:
    """The save's side of a manager. Engine thread; takes the manager lock to commit."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        tables: Tables,
        plane: DataPlane,
        keys: OpenKeys,
        stats: CacheStats,
    ) -> None:
        self._config = config
        self._tables = tables
        self._plane = plane
        self._keys = keys
        self._stats = stats

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
        step.layout.check_counts(*counts)
        slots = step.layout.order_rows(step.layout.row_order(req_ids))
        split = split_outputs(hidden, mm_outputs, *counts, policy)
        leftovers = self._leftovers(step, split)
        step.saved_keys = self._keys.open(split.specs(), policy.deferred_keys)
        step.leftovers = LeftoverPack(leftovers) if leftovers else None
        deferred = self._plane.transfer.deferrable(split.rows, split.deferred)
        reserved = self._reserve(sum(split.rows[name].nbytes for name in deferred))
        try:
            staged = self._plane.transfer.stage(
                split.rows, deferred, step.leftovers, counts[0], self._tables.steps.ids
            )
        except BaseException:
            self._plane.budget.release(reserved)
            raise
        try:
            self._commit(step, staged, slots, reserved)
        except BaseException:
            self._plane.transfer.give_up(staged)
            self._plane.budget.release(reserved)
            raise

    def closed_batch(self, reason: str | None) -> list[Operation]:
        """Close the open batch for this reason, if there are both. Caller holds manager lock."""
        if reason is None or not self._tables.deferred.num_bytes:
            return []
        return [self._plane.deferred_write_of(self._tables.deferred.close(reason))]

    def _commit(self, step: Step, staged: StagedStep, slots: Int64Array, reserved: int) -> None:
        """The step takes over its page, its rows become present, its write is appended."""
        write = self._plane.write_of(step, staged, slots)
        tables = self._tables
        with tables.lock:
            tables.check_open()
            tables.registry.note_saved(step.owners, step.layout.ends)
            step.delivered_before = tables.registry.delivered_ends(step.owners)
            late = () if self._config.prefetch else step.gathers.values()
            kept = self._keep(step, staged, slots, reserved)
            self._plane.take_page(step, staged, write)
            self._plane.log.append([*late, *write, *kept])
            tables.open_step = None
            tables.drafted = step if len(step.drafted) else None
            tables.steps.add(step)

    def _leftovers(self, step: Step, split: SplitOutputs) -> dict[str, object]:
        """The leftovers to deliver: a known key that is None this time is simply omitted (D6)."""
        leftovers = {
            name: value
            for name, value in split.leftovers.items()
            if value is not None or self._keys.get(name) is None
        }
        hidden_rows = sorted(leftovers.keys() & step.gathers.keys())
        if hidden_rows:
            raise KeyLayoutError(
                f"keys {hidden_rows} have hit rows to deliver in this step, but their value in it "
                "is not per-token: save the step without them"
            )
        return leftovers

    def _reserve(self, num_bytes: int) -> int:
        """Reserve device bytes for this step's deferred clones, before they are made (W4)."""
        if num_bytes:
            if not self._plane.budget.fits(num_bytes):
                with self._tables.lock:
                    self._plane.log.append(self.closed_batch("budget"))
                self._plane.committer.kick()
            self._plane.budget.reserve(num_bytes)
        return num_bytes

    def _keep(
        self, step: Step, staged: StagedStep, slots: Int64Array, reserved: int
    ) -> list[Operation]:
        """Mark the step's rows present and its deferred ones open. Caller holds manager lock.

        Rows of a step that was open at a reset are not kept (R1).
        """
        tables = self._tables
        if step.epoch != tables.epoch:
            self._plane.budget.release(reserved)
            return []
        tables.slots.mark_written(slots, [key.index for key in step.saved_keys])
        clones = {
            key: staged.deferred[key.spec.name]
            for key in step.saved_keys
            if key.spec.name in staged.deferred
        }
        if clones:
            tables.deferred.add(clones, slots, step.layout.req_ids)
        half = self._plane.budget.is_half_full(tables.deferred.num_bytes)
        return self.closed_batch("budget" if half else None)
