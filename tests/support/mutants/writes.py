"""Mutants that lose rows, write them in the wrong order, or refuse them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotmirror.core import open_keys, split
from slotmirror.core.deferred import DeferredRows, DeviceBudget
from slotmirror.core.errors import KeyLayoutError
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.operations import WriteTask
from slotmirror.core.saving import StepSaver
from slotmirror.core.write_task import TaskProgress, TaskState
from support.mutants.mutant import Mutant

_NOT_OPEN = -1


def older_deferred_rows_land_last(patches: pytest.MonkeyPatch) -> None:
    close = DeferredRows.close

    def backwards(self, reason):
        batch = close_without_deaths(self, close, reason)
        for key, clones in batch.clones.items():
            ends = np.cumsum([len(clone) for clone in clones])[:-1]
            batch.slots[key] = np.concatenate(np.split(batch.slots[key], ends)[::-1])
            clones.reverse()
        return batch

    patches.setattr(DeferredRows, "close", backwards)


def close_without_deaths(self, close, reason):
    """Close the batch as if no row in it had died."""
    entries = list(self._batch.entries)
    batch = close(self, reason)
    for key in batch.slots:
        batch.slots[key] = np.concatenate([e.slots for e in entries if key in e.clones])
    return batch


def a_slot_that_comes_back_keeps_its_first_row(patches: pytest.MonkeyPatch) -> None:
    add = DeferredRows.add

    def keep_first(self, clones, slots, req_ids):
        before = self._open_row[slots].copy()
        add(self, clones, slots, req_ids)
        self._open_row[slots] = np.where(before == _NOT_OPEN, self._open_row[slots], before)

    patches.setattr(DeferredRows, "add", keep_first)
    patches.setattr(DeferredRows, "kill", lambda self, slots: None)


def an_end_drops_what_was_not_written(patches: pytest.MonkeyPatch) -> None:
    close = DeferredRows.close

    def drop(self, reason):
        batch = close(self, reason)
        if reason == "ended" and batch.num_steps > 1:
            for slots in batch.slots.values():
                slots[:] = _NOT_OPEN
        return batch

    patches.setattr(DeferredRows, "close", drop)


def a_batch_grows_beyond_the_budget(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(DeviceBudget, "is_half_full", lambda self, num_bytes: False)
    patches.setattr(DeviceBudget, "fits", lambda self, num_bytes: True)


def a_batch_is_queued_twice(patches: pytest.MonkeyPatch) -> None:
    closed = StepSaver.closed_batch
    advance = TaskProgress.advance

    def twice(self, reason):
        return closed(self, reason) * (2 if reason == "budget" else 1)

    def any_number_of_times(self, target):
        if self.state is not TaskState.WRITTEN:
            advance(self, target)

    patches.setattr(StepSaver, "closed_batch", twice)
    patches.setattr(TaskProgress, "advance", any_number_of_times)


def the_budget_admits_everything(patches: pytest.MonkeyPatch) -> None:
    def reserve(self, num_bytes):
        self.bytes_reserved += num_bytes
        self._stats.device_bytes_high = max(self._stats.device_bytes_high, self.bytes_reserved)

    patches.setattr(DeviceBudget, "reserve", reserve)
    patches.setattr(DeviceBudget, "is_half_full", lambda self, num_bytes: False)


def a_changed_width_kills_the_cache(patches: pytest.MonkeyPatch) -> None:
    check = open_keys.check_layout
    killed = []

    def remember(spec, opened):
        try:
            check(spec, opened)
        except KeyLayoutError as error:
            killed.append(error)
            raise

    usable = PrefixCacheManager._check_usable

    def dead(self):
        if killed:
            self._log.poison(killed.pop(), "a key of another width")
        usable(self)

    patches.setattr(open_keys, "check_layout", remember)
    patches.setattr(PrefixCacheManager, "_check_usable", dead)


def rows_are_written_one_by_one_under_the_state_lock(patches: pytest.MonkeyPatch) -> None:
    made = PrefixCacheManager.__init__
    locks = []

    def make(self, *arguments, **settings):
        made(self, *arguments, **settings)
        locks[:] = [self._tables.lock]

    write = WriteTask.run

    def slowly(self, mover):
        with locks[0]:
            write(self, mover)

    patches.setattr(PrefixCacheManager, "__init__", make)
    patches.setattr(WriteTask, "run", slowly)


def only_padded_tensors_are_per_token(patches: pytest.MonkeyPatch) -> None:
    per_token = split.is_per_token
    patches.setattr(split, "_hidden_rows", lambda hidden, counts: hidden[: counts[0]])
    patches.setattr(
        split, "is_per_token", lambda output, counts: per_token(output, (counts[1], counts[1]))
    )


def flat_tensors_are_per_token(patches: pytest.MonkeyPatch) -> None:
    per_token = split.is_per_token

    def flat_too(output, counts):
        flat = isinstance(output, torch.Tensor) and output.dim() == 1
        return per_token(output[:, None] if flat else output, counts)

    patches.setattr(split, "is_per_token", flat_too)


def leftovers_are_cut_to_the_step(patches: pytest.MonkeyPatch) -> None:
    unpack = LeftoverPack.unpack

    def cut(self):
        return {
            name: value[: len(value) // 2] if name == "long" else value
            for name, value in unpack(self).items()
        }

    patches.setattr(LeftoverPack, "unpack", cut)


MUTANTS = [
    Mutant(5, "an older owner's deferred rows land over newer ones", older_deferred_rows_land_last),
    Mutant(6, "a request that lost and regained a slot keeps its stale row",
           a_slot_that_comes_back_keeps_its_first_row),
    Mutant(7, "an aborted request loses rows behind published hashes",
           an_end_drops_what_was_not_written),
    Mutant(8, "one long request defeats the byte budget", a_batch_grows_beyond_the_budget),
    Mutant(9, "a task is queued twice", a_batch_is_queued_twice),
    Mutant(14, "a key that changes width kills the cache for ever",
           a_changed_width_kills_the_cache),
    Mutant(15, "any number of bytes is admitted under a small budget",
           the_budget_admits_everything),
    Mutant(16, "rows are copied under the state lock",
           rows_are_written_one_by_one_under_the_state_lock),
    Mutant(21, "an unpadded key of a padded step is never cached",
           only_padded_tensors_are_per_token),
    Mutant(22, "a flat tensor is taken for rows", flat_tensors_are_per_token),
    Mutant(23, "a long leftover is cut", leftovers_are_cut_to_the_step),
]  # fmt: skip
