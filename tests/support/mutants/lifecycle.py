"""Mutants that deliver positions twice, or not at all, or never let go."""

from __future__ import annotations

import numpy as np
import pytest

from slotmirror.core.errors import MissingRowsError, ReplayOrderError
from support.mutants import insides
from support.mutants.mutant import Mutant


def a_resume_has_no_hit_span(patches: pytest.MonkeyPatch) -> None:
    spans = insides.SPANS_OF_HITS.original

    def fresh_only(self, events, index, hits):
        fresh = [h for h in hits if not insides.is_live(self, h[0].req_id)]
        return spans(self, events, index, fresh)

    insides.SPANS_OF_HITS.replace(patches, fresh_only)


def a_continuation_is_a_hit(patches: pytest.MonkeyPatch) -> None:
    spans = insides.SPANS_OF_HITS.original

    def live_too(self, events, index, hits):
        known = {request.req_id for request, _ in hits}
        more = [
            (request, 0)
            for request in events.new
            if request.req_id not in known
            and request.num_computed_tokens % insides.block_size_of(self) == 0
        ]
        return spans(self, events, index, [*hits, *more])

    insides.SPANS_OF_HITS.replace(patches, live_too)


def a_resume_is_trimmed_when_planned_only(patches: pytest.MonkeyPatch) -> None:
    merge = insides.MERGE_OUTPUTS.original

    def untrimmed(step, *arguments):
        step.delivered_before = np.zeros_like(step.delivered_before)
        return merge(step, *arguments)

    insides.MERGE_OUTPUTS.replace(patches, untrimmed)


def a_discarded_step_is_waited_for(patches: pytest.MonkeyPatch) -> None:
    take, check = insides.TAKE_STEP.original, insides.CHECK_REPLAYS.original
    discarded = []

    def remember(self, step_id):
        step = take(self, step_id)
        discarded[:] = [(self, step)]
        return step

    def wait_for_it(self, step):
        check(self, step)
        for steps, gone in discarded:
            owners = step.owners[step.replays]
            if steps is self and gone.step_id < step.step_id and np.isin(owners, gone.owners).any():
                raise ReplayOrderError(step.step_id, [gone.step_id], [])

    insides.TAKE_STEP.replace(patches, remember)
    insides.CHECK_REPLAYS.replace(patches, wait_for_it)


def planned_reads_of_discarded_steps_stay(patches: pytest.MonkeyPatch) -> None:
    plan, materialize = insides.PLAN_GATHERS.original, insides.MATERIALIZE.original
    registered = {}

    def register(plane, events, hits, keys):
        gathers = plan(plane, events, hits, keys)
        registered.setdefault(id(plane), {})[id(hits)] = gathers
        return gathers

    def fetch(self, step_id, req_ids=None, **settings):
        step = insides.unconsumed_step(self, step_id)
        out = materialize(self, step_id, req_ids, **settings)
        registered.get(id(insides.plane_of(self)), {}).pop(id(step.hits), None)
        return out

    insides.PLAN_GATHERS.replace(patches, register)
    insides.MATERIALIZE.replace(patches, fetch)


def shutdown_does_not_wait_for_readers(patches: pytest.MonkeyPatch) -> None:
    close = insides.CLOSE_PLANE.original
    insides.CLOSE_PLANE.replace(patches, lambda self, busy: close(self, lambda: 0))


def one_unreadable_hit_consumes_the_step(patches: pytest.MonkeyPatch) -> None:
    materialize = insides.MATERIALIZE.original

    def consume(self, step_id, req_ids=None, **settings):
        try:
            return materialize(self, step_id, req_ids, **settings)
        except MissingRowsError:
            self.discard_step(step_id)
            raise

    insides.MATERIALIZE.replace(patches, consume)


MUTANTS = [
    Mutant(17, "a read that was planned but never fetched stays registered",
           planned_reads_of_discarded_steps_stay),
    Mutant(18, "shutdown does not wait for readers", shutdown_does_not_wait_for_readers),
    Mutant(24, "a resume delivers nothing of the newly hit span", a_resume_has_no_hit_span),
    Mutant(25, "a continuation delivers rows twice", a_continuation_is_a_hit),
    Mutant(27, "a resume trimmed only when planned delivers rows twice",
           a_resume_is_trimmed_when_planned_only),
    Mutant(28, "a discard makes a later legal step raise", a_discarded_step_is_waited_for),
    Mutant(32, "one unreadable hit loses the whole step", one_unreadable_hit_consumes_the_step),
]  # fmt: skip
