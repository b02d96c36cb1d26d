"""Saved steps that nobody has consumed yet, and the rules of consuming them (S2, L3).

The manager lock covers every method; at most `staging_depth` steps are here, since each holds a
page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotmirror.core.errors import (
    CacheShutDownError,
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
        self._closed = False

    def add(self, step: Step) -> int:
        """A step was saved; returns its id."""
        self._steps[step.step_id] = step
        self._last_id = step.step_id
        return step.step_id

    def ids(self) -> list[int]:
        """Ids of unconsumed steps; also without the lock, then perhaps a step late."""
        return list(self._steps)

    def oldest_id(self, newest: int) -> int:
        """The oldest unconsumed step; `newest` if there is none."""
        return next(iter(self._steps), newest)

    @property
    def num_consuming(self) -> int:
        """Steps that are being materialized right now; also without the lock."""
        return sum(step.consuming for step in list(self._steps.values()))

    def begin(self, step_id: int, req_ids: Sequence[str] | None) -> Step:
        """Claim a step for the calling consumer; changes nothing when it raises."""
        self._check_open()
        step = self._saved(step_id)
        if req_ids is not None and req_ids != step.events.req_ids:
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

    def abort(self, step: Step) -> bool:
        """The consumer failed; the step may be consumed by another call.

        False after `close`: nobody will consume it. The caller must give it up, and it counts as
        busy until `drop`, so that a shutdown waits for that.
        """
        if self._closed:
            return False
        step.consuming = False
        return True

    def drop(self, step: Step) -> None:
        """The step was given up after `close`."""
        del self._steps[step.step_id]

    def finish(self, step: Step, owners: Int64Array, ends: Int64Array) -> None:
        """These owners were delivered up to `ends`; the id is used up.

        Later replays of them are cut there. Only later ones: a step may be consumed before a
        replay that came earlier, and what it delivered lies behind the replay's rows.
        """
        del self._steps[step.step_id]
        for later in self._steps.values():
            if later.step_id > step.step_id and len(later.replays):
                replayed = later.owners[later.replays]
                for index, owner in zip(later.replays.tolist(), replayed.tolist(), strict=True):
                    delivered = ends[owners == owner].max(initial=0)
                    later.delivered_before[index] = max(later.delivered_before[index], delivered)

    def take(self, step_id: int) -> Step:
        """Remove a step that is to be discarded."""
        self._check_open()
        step = self._saved(step_id)
        del self._steps[step_id]
        return step

    def close(self) -> list[Step]:
        """Refuse further consumers; removes and returns every step that none is busy with."""
        self._closed = True
        idle = [step for step in self._steps.values() if not step.consuming]
        for step in idle:
            del self._steps[step.step_id]
        return idle

    def _check_open(self) -> None:
        if self._closed:
            raise CacheShutDownError("this cache was shut down; make a new manager")

    def _saved(self, step_id: int) -> Step:
        step = self._steps.get(step_id)
        if step is None:
            given_out = 0 < step_id <= self._last_id
            reason = "was already consumed" if given_out else "was never given out"
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
        earlier: list[int] = []
        late = np.zeros(len(replayed), dtype=np.bool_)
        for other in self._steps.values():
            if other.step_id < step.step_id:
                shared = np.isin(replayed, other.owners)
                if shared.any():
                    earlier.append(other.step_id)
                    late |= shared
        if earlier:
            names = [step.events.req_ids[i] for i in step.replays[late].tolist()]
            raise ReplayOrderError(step.step_id, earlier, names)
