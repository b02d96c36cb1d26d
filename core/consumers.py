"""Consuming saved steps: `materialize` or `discard`, on any thread, exactly once each (S2)."""

from __future__ import annotations

from collections.abc import Sequence

from slotmirror.core.data_plane import DataPlane
from slotmirror.core.errors import MissingRowsError
from slotmirror.core.merge import Merge, StageOutputs
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
        wanted = None if req_ids is None else tuple(dict.fromkeys(req_ids))
        with self._tables.lock:
            self._tables.check_open()
            step = self._tables.steps.begin(step_id, wanted)
        if wanted == step.events.req_ids:
            wanted = None
        try:
            self._plane.await_rows(step, self._tables.steps.ids)
            missing = step.missing_in(wanted)
            if missing:
                raise MissingRowsError(step.step_id, missing)
            sender = self._plane.device_outputs if device else None
            merge = Merge(step, wanted, self._plane.buffers, sender)
            outputs = merge.outputs()
        except BaseException:
            with self._tables.lock:
                if self._tables.closed:
                    # Nobody will consume it. The release is in the log before the step stops
                    # counting as busy, so the shutdown waits for it.
                    self._plane.log.append([self._plane.release_of(step)])
                    self._tables.steps.drop(step)
                step.consuming = False
            self._plane.committer.kick()
            self._plane.log.wake()
            raise
        # Before the step stops counting as busy: a shutdown then finds the page free (S3).
        self._plane.ring.let_go(step.page)
        owners, ends = step.owners[merge.which], step.ends[merge.which]
        with self._tables.lock:
            self._tables.registry.note_delivered(owners, ends)
            self._tables.steps.finish(step, owners, ends)
            self._plane.stats.steps_materialized += 1
        if self._tables.closed:
            # A shutdown that looked before the step was finished waits for it.
            self._plane.log.wake()
        # The step's write was not urgent for the engine's thread; this one has time.
        self._plane.log.wake_mover()
        return outputs

    def discard(self, step_id: int) -> None:
        """See `PrefixCacheManager.discard_step`."""
        with self._tables.lock:
            self._tables.check_open()
            step = self._tables.steps.take(step_id)
            self._plane.log.append([self._plane.release_of(step)])
            self._plane.stats.steps_discarded += 1
        self._plane.committer.kick()
