"""Mutants that lose rows, write them in the wrong order, or refuse them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotmirror.core.errors import KeyLayoutError
from slotmirror.core.write_task import TaskState
from support.mutants import insides
from support.mutants.mutant import Mutant


def older_deferred_rows_land_last(patches: pytest.MonkeyPatch) -> None:
    close = insides.CLOSE_BATCH.original

    def backwards(self, reason):
        batch = close_without_deaths(self, close, reason)
        for clones in batch.clones.values():
            clones.reverse()
        return batch

    insides.CLOSE_BATCH.replace(patches, backwards)


def close_without_deaths(self, close, reason):
    """Close the batch as if no row in it had died."""
    slots = insides.slots_of_open_batch(self)
    batch = close(self, reason)
    batch.slots = slots
    return batch


def a_slot_that_comes_back_keeps_its_first_row(patches: pytest.MonkeyPatch) -> None:
    add = insides.ADD_DEFERRED.original

    def keep_first(self, clones, slots, req_ids):
        steps = insides.open_steps_of(self)
        before = steps[slots].copy()
        add(self, clones, slots, req_ids)
        steps[slots] = np.where(before == insides.NOT_OPEN, steps[slots], before)

    insides.ADD_DEFERRED.replace(patches, keep_first)
    insides.KILL_DEFERRED.replace(patches, lambda self, slots: None)


def an_end_drops_what_was_not_written(patches: pytest.MonkeyPatch) -> None:
    close = insides.CLOSE_BATCH.original

    def drop(self, reason):
        batch = close(self, reason)
        if reason == "ended" and len(batch.slots) > 1:
            for slots in batch.slots:
                slots[:] = insides.NOT_OPEN
        return batch

    insides.CLOSE_BATCH.replace(patches, drop)


def a_batch_grows_beyond_the_budget(patches: pytest.MonkeyPatch) -> None:
    insides.HALF_FULL.replace(patches, lambda self, num_bytes: False)
    insides.FITS.replace(patches, lambda self, num_bytes: True)


def a_batch_is_queued_twice(patches: pytest.MonkeyPatch) -> None:
    append, append_batch = insides.APPEND.original, insides.APPEND_BATCH.original
    copies = [1]
    advance = insides.ADVANCE_TASK.original

    def twice(self, reason):
        copies[:] = [2 if reason == "budget" else 1]
        append_batch(self, reason)
        copies[:] = [1]

    def append_copies(self, operations):
        append(self, [*operations] * copies[0])

    def any_number_of_times(self, target):
        if self.state is not TaskState.WRITTEN:
            advance(self, target)

    insides.APPEND.replace(patches, append_copies)
    insides.APPEND_BATCH.replace(patches, twice)
    insides.ADVANCE_TASK.replace(patches, any_number_of_times)


def the_budget_admits_everything(patches: pytest.MonkeyPatch) -> None:
    insides.RESERVE_BYTES.replace(patches, insides.charge)
    insides.HALF_FULL.replace(patches, lambda self, num_bytes: False)


def a_changed_width_kills_the_cache(patches: pytest.MonkeyPatch) -> None:
    check = insides.CHECK_LAYOUT.original
    killed = []

    def remember(spec, opened):
        try:
            check(spec, opened)
        except KeyLayoutError as error:
            killed.append(error)
            raise

    usable = insides.CHECK_USABLE.original

    def dead(self):
        if killed:
            insides.log_of(self).poison(killed.pop(), "a key of another width")
        usable(self)

    insides.CHECK_LAYOUT.replace(patches, remember)
    insides.CHECK_USABLE.replace(patches, dead)


def rows_are_written_one_by_one_under_the_state_lock(patches: pytest.MonkeyPatch) -> None:
    made = insides.MAKE_MANAGER.original
    locks = []

    def make(self, *arguments, **settings):
        made(self, *arguments, **settings)
        locks[:] = [insides.manager_lock_of(self)]

    write = insides.RUN_WRITE.original

    def slowly(self, mover):
        with locks[0]:
            write(self, mover)

    insides.MAKE_MANAGER.replace(patches, make)
    insides.RUN_WRITE.replace(patches, slowly)


def only_padded_tensors_are_per_token(patches: pytest.MonkeyPatch) -> None:
    per_token = insides.IS_PER_TOKEN.original
    insides.HIDDEN_ROWS.replace(patches, lambda hidden, counts: hidden[: counts[0]])
    insides.IS_PER_TOKEN.replace(
        patches, lambda output, counts: per_token(output, (counts[1], counts[1]))
    )


def flat_tensors_are_per_token(patches: pytest.MonkeyPatch) -> None:
    per_token = insides.IS_PER_TOKEN.original

    def flat_too(output, counts):
        flat = isinstance(output, torch.Tensor) and output.dim() == 1
        return per_token(output[:, None] if flat else output, counts)

    insides.IS_PER_TOKEN.replace(patches, flat_too)


def leftovers_are_cut_to_the_step(patches: pytest.MonkeyPatch) -> None:
    unpack = insides.UNPACK_LEFTOVERS.original

    def cut(self):
        return {
            name: value[: len(value) // 2] if name == "long" else value
            for name, value in unpack(self).items()
        }

    insides.UNPACK_LEFTOVERS.replace(patches, cut)


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
