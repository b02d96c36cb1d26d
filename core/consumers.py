"""Consuming saved steps: `materialize` or `discard`, on any thread, exactly once each (S2)."""

from __future__ import annotations

from collections.abc import Sequence

from slotmirror.core.data_plane import DataPlane
from slotmirror.core.errors import MissingRowsError
from slotmirror.core.merge import RequestIndex, StageOutputs, merge_outputs
from slotmirror.core.tables import Tables


class StepConsumers:
    """The consumer's side of a manager; takes the manager lock for its tables, not for rows."""

    def __init__(self, tables: Tables, plane: DataPlane) -> None:
        self._tables = tables
        self._plane = plane

    def materialize(
        self, step_id: int, req_ids: Sequence[str] | None, *, device: bool
    ) -> StageOutputs:
        """See `PrefixCacheManager.materialize`."""
        tables, plane = self._tables, self._plane
        with tables.lock:
            tables.check_open()
            step = tables.steps.begin(step_id, req_ids)
        try:
            index = RequestIndex(step.events.req_ids, req_ids)
            plane.await_rows(step)
            missing = step.missing_in(index.req_ids)
            if missing:
                raise MissingRowsError(step.step_id, missing)
            sender = plane.device_outputs if device else None
            outputs = merge_outputs(step, index, plane.buffers, sender)
        except BaseException:
            with tables.lock:
                if tables.closed:
                    # Nobody will consume it. The release is in the log before the step stops
                    # counting as busy, so the shutdown waits for it.
                    plane.ring.give_up(step.page, f"step {step_id}")
                    tables.steps.drop(step)
                step.consuming = False
            plane.committer.kick()
            plane.log.wake()
            raise
        # Before the step stops counting as busy: a shutdown then finds the page free (S3).
        plane.ring.let_go(step.page)
        owners, ends = step.owners[index.which], step.ends[index.which]
        with tables.lock:
            tables.registry.note_delivered(owners, ends)
            tables.steps.finish(step, owners, ends)
            plane.stats.steps_materialized += 1
        # A shutdown that looked before the step was finished waits for it; and the step's write
        # was not urgent for the engine's thread, while this one has time to wake the mover.
        plane.log.wake()
        return outputs

    def discard(self, step_id: int) -> None:
        """See `PrefixCacheManager.discard_step`."""
        with self._tables.lock:
            self._tables.check_open()
            step = self._tables.steps.take(step_id)
            self._plane.ring.give_up(step.page, f"step {step_id}")
            self._plane.stats.steps_discarded += 1
        self._plane.committer.kick()
