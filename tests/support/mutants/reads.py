"""Mutants that read the wrong rows, or the right ones at the wrong time."""

from __future__ import annotations

import numpy as np
import pytest

from slotmirror.core.committer import Committer
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.hit_planning import HitPlanner
from slotmirror.core.merge import Merge
from slotmirror.core.operations import GatherTask
from slotmirror.core.oplog import OpLog
from slotmirror.core.page_transfer import PageTransfer
from slotmirror.core.slot_table import NO_HIT_ROWS, HitRows, SlotTable
from support.mutants.mutant import Mutant


def saves_the_models_own_buffers(patches: pytest.MonkeyPatch) -> None:
    sources = PageTransfer._sources

    def deferred_only(self, tensors, cloned):
        clones = sources(self, tensors, cloned)
        asked = [*cloned, *[False] * (len(tensors) - len(cloned))]
        return [clones[i] if asked[i] else tensors[i] for i in range(len(tensors))]

    patches.setattr(PageTransfer, "_sources", deferred_only)


def hits_ignore_what_the_step_computes(patches: pytest.MonkeyPatch) -> None:
    def plan_hits(self, step_slots, hit_slots):
        if not len(hit_slots):
            return NO_HIT_ROWS
        present = self._present[hit_slots, : self._num_keys]
        return HitRows(hit_slots, np.full(len(hit_slots), -1), present)

    patches.setattr(SlotTable, "plan_hits", plan_hits)


def gathers_when_it_plans(patches: pytest.MonkeyPatch) -> None:
    plan = HitPlanner._gather

    def gather_now(self, hits, out_rows, key):
        task = plan(self, hits, out_rows, key)
        task._out[:] = key.rows[task._slots]
        return task

    patches.setattr(HitPlanner, "_gather", gather_now)
    patches.setattr(GatherTask, "run", _only_zero_rows)


def gathers_when_it_materializes(patches: pytest.MonkeyPatch) -> None:
    arrive = DataPlane.await_rows

    def await_rows(self, step, unconsumed):
        arrive(self, step, unconsumed)
        for gather in step.gathers.values():
            gather._out[:] = gather.key.rows[gather._slots]
            _only_zero_rows(gather, None)

    patches.setattr(DataPlane, "await_rows", await_rows)
    patches.setattr(GatherTask, "run", lambda self, mover: None)


def _only_zero_rows(task, mover):
    if len(task._zero_rows):
        task._out[task._zero_rows] = np.zeros((), task._out.dtype)


def completes_before_it_has_run(patches: pytest.MonkeyPatch) -> None:
    carry_out, complete = Committer._carry_out, OpLog.complete

    def too_early(self, operation):
        complete(self._log, dropped=False)
        carry_out(self, operation)

    patches.setattr(Committer, "_carry_out", too_early)
    patches.setattr(OpLog, "complete", lambda self, *, dropped: None)


def a_claim_leaves_omitted_keys_present(patches: pytest.MonkeyPatch) -> None:
    def mark_written(self, slots, key_indices):
        self._present[np.ix_(slots, key_indices)] = True

    patches.setattr(SlotTable, "claim", lambda self, slots: None)
    patches.setattr(SlotTable, "mark_written", mark_written)


def nothing_is_claimed(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(SlotTable, "claim", lambda self, slots: None)


def hit_rows_of_omitted_keys_are_dropped(patches: pytest.MonkeyPatch) -> None:
    outputs = Merge.outputs

    def without_omitted(self):
        saved = {key.spec.name for key in self._step.saved_keys}
        for name in set(self._step.gathers) - saved:
            del self._step.gathers[name]
        return outputs(self)

    patches.setattr(Merge, "outputs", without_omitted)


MUTANTS = [
    Mutant(1, "the next forward overwrites rows that are still being copied",
           saves_the_models_own_buffers),
    Mutant(2, "a same-step hit reads the former owner's rows", hits_ignore_what_the_step_computes),
    Mutant(3, "a recycled block is read too early", gathers_when_it_plans),
    Mutant(4, "a reassigned slot is read too late", gathers_when_it_materializes),
    Mutant(10, "done is signalled before it is true", completes_before_it_has_run),
    Mutant(11, "a slot whose new owner omits a key serves the former owner's row",
           a_claim_leaves_omitted_keys_present),
    Mutant(26, "a failed forward leaves the former owner's rows hittable", nothing_is_claimed),
    Mutant(30, "hit rows are lost when the hit's own step omits their key",
           hit_rows_of_omitted_keys_are_dropped),
]  # fmt: skip
