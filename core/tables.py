"""Everything that the manager lock covers, in one place (T4)."""

from __future__ import annotations

import numpy as np

from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.deferred import DeferredRows
from slotmirror.core.errors import CacheShutDownError, EngineDivergenceError
from slotmirror.core.events import Int64Array, StepEvents
from slotmirror.core.hit_registry import HitRegistry
from slotmirror.core.runtime import Lock
from slotmirror.core.slot_table import SlotTable
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import Step
from slotmirror.core.unconsumed import UnconsumedSteps


class Tables:
    """Owners, slots, the open batch, the open and the unconsumed steps; callers hold `lock`.

    open_step    started, not yet saved
    drafted      the last saved step, while its drafts are unverified (L7)
    epoch        counts resets; rows of a step that began before one are not kept (R1)
    engine_busy  a save is under way: a shutdown waits for it; read without the lock too
    """

    def __init__(self, config: PrefixCacheConfig, lock: Lock, stats: CacheStats) -> None:
        self.lock = lock
        self.registry = HitRegistry(config.num_blocks, config.block_size)
        self.slots = SlotTable(config.num_slots)
        self.deferred = DeferredRows(config.num_slots, stats)
        self.steps = UnconsumedSteps()
        self.open_step: Step | None = None
        self.drafted: Step | None = None
        self.epoch = 0
        self.engine_busy = False
        self.closed = False
        self._stats = stats

    def check_open(self) -> None:
        """Raise `CacheShutDownError` after a shutdown has begun."""
        if self.closed:
            raise CacheShutDownError("this cache was shut down; make a new manager")

    def abandon_open_step(self) -> None:
        """The open step's save will never come: its slots stay absent (C3)."""
        if self.open_step is not None:
            self.open_step = None
            self._stats.steps_abandoned += 1

    def accepted_ends(self, events: StepEvents) -> Int64Array | None:
        """Where the drafts of the step before end; changes nothing (L7).

        Raises `EngineDivergenceError` for a request whose accepted position is missing or
        impossible.
        """
        step = self.drafted
        if step is None:
            return None
        first, names = step.events.first_positions, step.events.req_ids
        drafted = [names[i] for i in step.drafted.tolist()]
        positions = events.verified_positions
        ends = np.array([positions.get(name, -1) for name in drafted], dtype=np.int64)
        if ((ends <= first[step.drafted]) | (ends > step.ends[step.drafted])).any():
            raise EngineDivergenceError(
                f"step {step.step_id} computed drafts of {drafted}: verified_positions "
                f"{dict(positions)} must name an accepted position within each one's rows"
            )
        return ends

    def settle_drafts(self, accepted: Int64Array | None) -> None:
        """Rejected drafts are never delivered, and are saved again."""
        step, self.drafted = self.drafted, None
        if step is not None and accepted is not None:
            self.registry.note_verified(step.owners[step.drafted], accepted)
            step.ends[step.drafted] = accepted
            step.drafted = step.drafted[:0]
