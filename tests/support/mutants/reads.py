"""Mutants that read the wrong rows, or the right ones at the wrong time."""

from __future__ import annotations

import pytest

from support.mutants import insides
from support.mutants.mutant import Mutant


def saves_the_models_own_buffers(patches: pytest.MonkeyPatch) -> None:
    sources = insides.SOURCES_OF_COPIES.original

    def deferred_only(self, tensors, asked):
        clones = sources(self, tensors, asked)
        deferred = [*asked, *[False] * (len(tensors) - len(asked))]
        return [clones[i] if deferred[i] else tensors[i] for i in range(len(tensors))]

    insides.SOURCES_OF_COPIES.replace(patches, deferred_only)


def hits_ignore_what_the_step_computes(patches: pytest.MonkeyPatch) -> None:
    def plan_hits(self, step_slots, hit_slots):
        return insides.hits_without_own_rows(self, hit_slots)

    insides.PLAN_HITS.replace(patches, plan_hits)


def gathers_when_it_plans(patches: pytest.MonkeyPatch) -> None:
    make = insides.MAKE_GATHER.original

    def gather_now(*arguments):
        task = make(*arguments)
        insides.read_pool_now(task)
        return task

    insides.MAKE_GATHER.replace(patches, gather_now)
    insides.RUN_GATHER.replace(patches, lambda self, mover: insides.zero_absent_rows(self))


def gathers_when_it_materializes(patches: pytest.MonkeyPatch) -> None:
    arrive = insides.AWAIT_ROWS.original

    def await_rows(self, step):
        arrive(self, step)
        for gather in step.gathers.values():
            insides.read_pool_now(gather)
            insides.zero_absent_rows(gather)

    insides.AWAIT_ROWS.replace(patches, await_rows)
    insides.RUN_GATHER.replace(patches, lambda self, mover: None)


def completes_before_it_has_run(patches: pytest.MonkeyPatch) -> None:
    carry_out, complete = insides.CARRY_OUT.original, insides.COMPLETE.original

    def too_early(self, operation):
        complete(insides.log_of(self), dropped=False)
        carry_out(self, operation)

    insides.CARRY_OUT.replace(patches, too_early)
    insides.COMPLETE.replace(patches, lambda self, *, dropped: None)


def a_claim_leaves_omitted_keys_present(patches: pytest.MonkeyPatch) -> None:
    insides.CLAIM.replace(patches, lambda self, slots: None)
    insides.MARK_WRITTEN.replace(patches, insides.mark_present)


def nothing_is_claimed(patches: pytest.MonkeyPatch) -> None:
    insides.CLAIM.replace(patches, lambda self, slots: None)


def hit_rows_of_omitted_keys_are_dropped(patches: pytest.MonkeyPatch) -> None:
    merge = insides.MERGE_OUTPUTS.original

    def without_omitted(step, *arguments):
        insides.forget_hits_of_omitted_keys(step)
        return merge(step, *arguments)

    insides.MERGE_OUTPUTS.replace(patches, without_omitted)


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
