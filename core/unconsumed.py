"""Saved steps that nobody has consumed yet, and the rules of consuming them (S2, L3).

The manager lock covers every method; at most `staging_depth` steps are here, since each holds a
page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotmirror.core.errors import (
    ReplayOrderError,
    RequestNotInStepError,
    StepStateError,
    UnknownStepError,
)
from slotmirror.core.events import Int64Array
from slotmirror.core.step import Step


class UnconsumedSteps:
    """Steps by id, in the order of their saves."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        self._last_id = 0

    def add(self, step: Step) -> None:
        """A step was saved."""
        self._steps[step.step_id] = step
        self._last_id = step.step_id

    def ids(self) -> list[int]:
        """Ids of unconsumed steps; also without the lock, then perhaps a step late."""
        return list(self._steps)

    @property
    def num_consuming(self) -> int:
        """Steps that are being materialized right now; also without the lock."""
        return sum(step.consuming for step in list(self._steps.values()))

    def begin(self, step_id: int, req_ids: Sequence[str] | None) -> Step:
        """Claim a step for the calling consumer; changes nothing when it raises."""
        step = self._saved(step_id)
        if req_ids is not None and tuple(req_ids) != step.events.req_ids:
            absent = set(req_ids).difference(step.events.req_ids)
            if absent:
                raise RequestNotInStepError(step_id, sorted(absent))
        if len(step.drafted):
            raise StepStateError(
                f"step {step_id} has drafts that are not verified yet: materialize it after the "
                "next new_step_starts, whose verified_positions say what was accepted"
            )
        self._check_replays(step)
        step.consuming = True
        return step

    def take(self, step_id: int) -> Step:
        """Remove a step that is to be given up."""
        step = self._saved(step_id)
        self.drop(step)
        return step

    def take_idle(self) -> list[Step]:
        """Remove every step that no consumer is busy with."""
        idle = [step for step in self._steps.values() if not step.consuming]
        for step in idle:
            self.drop(step)
        return idle

    def drop(self, step: Step) -> None:
        """Forget a step, busy or not."""
        del self._steps[step.step_id]

    def finish(self, step: Step, owners: Int64Array, ends: Int64Array) -> None:
        """These owners were delivered up to `ends`; the id is used up.

        Later replays of them are cut there. Only later ones: a step may be consumed before a
        replay that came earlier, and what it delivered lies behind the replay's rows.
        """
        self.drop(step)
        for later in self._steps.values():
            if later.step_id > step.step_id:
                for i in later.replays.tolist():
                    before = later.delivered_before[i]
                    later.delivered_before[i] = ends[owners == later.owners[i]].max(initial=before)

    def _saved(self, step_id: int) -> Step:
        step = self._steps.get(step_id)
        if step is None:
            reason = (
                "was already consumed" if 0 < step_id <= self._last_id else "was never given out"
            )
            raise UnknownStepError(step_id, reason, self.ids())
        if step.consuming:
            raise StepStateError(
                f"step {step_id} is being materialized by another call: one consumer per step"
            )
        return step

    def _check_replays(self, step: Step) -> None:
        if not len(step.replays):
            return
        replayed = step.owners[step.replays]
        earlier = [
            other
            for other in self._steps.values()
            if other.step_id < step.step_id and np.isin(replayed, other.owners).any()
        ]
        if earlier:
            late = np.isin(replayed, np.concatenate([other.owners for other in earlier]))
            names = [step.events.req_ids[i] for i in step.replays[late].tolist()]
            raise ReplayOrderError(step.step_id, [other.step_id for other in earlier], names)
