"""The cache that an engine's adapter talks to.

Threads: `new_step_starts`, `save_outputs`, `preallocate` and `reset` belong to the engine thread;
`materialize` and `discard_step` may be called from any thread, as may the rest.
Locks: the manager lock covers the tables, the open step and the unconsumed steps; the log lock is
taken inside it only to append. Neither is held across a wait, a copy, an allocation or a backend
call (T4, T5). The engine thread waits for a staging page or device budget, and nothing else (T1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.errors import MissingRowsError, StepStateError
from slotmirror.core.events import StepEvents
from slotmirror.core.hits import NO_HITS, Hits
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.layout import check_shape, check_slots
from slotmirror.core.memory_plan import MemoryPlan, plan_memory
from slotmirror.core.merge import RequestIndex, StageOutputs, merge_outputs
from slotmirror.core.open_keys import OpenKeys
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.runtime import Runtime, ThreadRuntime
from slotmirror.core.saving import StepSaver
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import Step
from slotmirror.core.tables import Tables


class PrefixCacheManager:
    """One stage's output cache: a row per KV slot for every per-token output.

    `backend` must serve the device on which the stage computes; `runtime` is replaced by tests.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        runtime: Runtime | None = None,
    ) -> None:
        self.config = config
        runtime = runtime or ThreadRuntime()
        self._stats = CacheStats()
        self._tables = Tables(config, runtime.lock("manager"), self._stats)
        self._plane = DataPlane(config, backend, runtime, self._stats)
        self._log = self._plane.log
        self._log.unconsumed = self._tables.steps.ids
        self._keys = OpenKeys(self._tables, self._plane)
        self._saver = StepSaver(self._tables, self._plane, self._keys)
        self._policy: ModelCachePolicy | None = None

    # -- set-up -----------------------------------------------------------------------------

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Say what the model needs, once, before the first step (K4)."""
        self._check_usable()
        if self._policy is not None and self._policy != policy:
            raise StepStateError(f"the policy is {self._policy} already; make a new manager")
        self._policy = policy

    def preallocate(self, keys: Iterable[KeySpec]) -> MemoryPlan:
        """Open keys now, so that no request pays for their allocation (M2); returns the plan.

        Follows `register_policy`, which says what is deferred. Engine thread.
        """
        deferred = self._check_ready().deferred_keys
        self._keys.open(keys, deferred)
        return plan_memory(self.config, [key.spec for key in self._keys.by_name.values()], deferred)

    # -- the engine thread ------------------------------------------------------------------

    def new_step_starts(self, events: StepEvents) -> None:
        """Claim this step's slots, register its hits and start reading them (C1, C2).

        Once per real step, before the forward, also for steps with ended requests and no tokens
        (L6). Raises `HitSpanError` (D4), `RowLayoutError` (S4), `UnknownRequestError` and
        `HostMemoryLimitError` (M3) with nothing changed; the engine must then not run the step.
        """
        self._check_ready()
        check_shape(events)
        tables = self._tables
        with tables.lock:
            accepted = tables.accepted_ends(events)
            spans = tables.registry.plan(events)
            check_slots(events, self.config)
            rows = tables.slots.plan_hits(events.slots, spans.slots) if len(spans.slots) else None
        hits = Hits(events, spans, *rows) if rows else NO_HITS
        keys = self._keys.by_name.values()
        gathers = self._plane.gathers_of(events, hits, keys) if rows else {}
        self._plane.committer.start()
        with tables.lock:
            tables.check_open()
            tables.settle_drafts(accepted)
            tables.abandon_open_step()
            if tables.deferred.num_bytes:
                reason = tables.deferred.reason_to_close(events, spans.slots)
                if reason is not None:
                    self._saver.close_batch(reason)
                tables.deferred.kill(events.slots)
            step_id = self._stats.steps_started = self._stats.steps_started + 1
            oldest = min(tables.steps.ids(), default=step_id)
            owners = tables.registry.apply(events, spans, step_id, oldest)
            tables.slots.claim(events.slots)
            if events.total_tokens:
                tables.open_step = Step(
                    step_id=step_id,
                    events=events,
                    hits=hits,
                    gathers=gathers,
                    epoch=tables.epoch,
                    owners=owners,
                    ends=events.first_positions + events.num_tokens,
                    replays=tables.registry.replays(owners, spans.first_delivered(events)),
                    drafted=events.indices_of(events.drafted),
                )
            if rows:
                self._stats.hits += len(hits.spans.request)
                self._stats.hit_tokens += len(hits)
                self._stats.own_step_hit_tokens += int(np.count_nonzero(hits.own_row >= 0))
                if self.config.prefetch:
                    self._log.append(list(gathers.values()))
        self._plane.committer.kick()

    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[str, object],
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int | None = None,
        req_ids: Sequence[str] | None = None,
    ) -> int:
        """Take this step's outputs, shape `(n or n_padded, …)` each; returns the step id.

        `req_ids` is the order of the requests' rows in the tensors, the batch order by default.
        The tensors may be overwritten as soon as it returns (D9). Waits, bounded, for a page
        (S1) and, with deferred keys, for device budget (W4). Until it returns nothing has changed:
        the step stays open and the save may be repeated, for instance without the key that it
        refused (C3).
        """
        padded = num_tokens_unpadded if num_tokens_padded is None else num_tokens_padded
        tables = self._tables
        with tables.lock:
            policy, step = self._check_ready(), tables.open_step
            if step is None:
                raise StepStateError(
                    "save_outputs without an open step: call new_step_starts first, once per step; "
                    "warm-up, profiling and graph-capture runs must not be saved"
                )
            # A shutdown waits from now on until this save is over, however it ends.
            tables.engine_busy = True
        try:
            counts = (num_tokens_unpadded, padded)
            self._saver.save(policy, step, hidden, mm_outputs, counts, req_ids)
        finally:
            with tables.lock:
                tables.engine_busy = False
                if tables.closed:
                    tables.abandon_open_step()
            if tables.closed:
                self._log.wake()
            self._plane.committer.kick()
        self._stats.steps_saved += 1
        self._stats.tokens_saved += num_tokens_unpadded
        return step.step_id

    def reset(self) -> None:
        """Forget every row: the engine's cache was reset, or its weights changed (R1).

        Steps in flight are delivered as they are; a step that is open now is delivered but not
        kept. Memory stays.
        """
        tables = self._tables
        with tables.lock:
            self._check_usable()
            tables.slots.clear()
            tables.epoch += 1
            if tables.deferred.num_bytes:
                self._plane.budget.release(tables.deferred.close("reset").num_bytes)

    # -- any thread -------------------------------------------------------------------------

    def materialize(
        self, step_id: int, req_ids: Sequence[str] | None = None, *, device: bool = False
    ) -> StageOutputs:
        """The outputs of these requests, all by default; consumes the step for all (S2).

        Waits, bounded, for the step's copy and its reads (T2, W6). Raises `MissingRowsError` (D5),
        `GatherFailedError` (W5), `ReplayOrderError` (L3), `WaitTimeoutError`, `UnknownStepError`,
        `RequestNotInStepError`; then nothing was delivered and the step is unconsumed.
        Returned tensors are the caller's, and share one buffer per key. With `device` rows lie on
        the device once `arrival` is reached (`NotSupported` where the backend cannot); leftovers
        stay on the host.
        """
        tables, plane = self._tables, self._plane
        wanted = None if req_ids is None else tuple(req_ids)
        with tables.lock:
            self._check_usable()
            step = tables.steps.begin(step_id, wanted)
        try:
            index = RequestIndex(step.events.req_ids, wanted)
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
            self._stats.steps_materialized += 1
        # A shutdown that looked before the step was finished waits for it; and the step's write
        # was not urgent for the engine's thread, while this one has time to wake the mover.
        plane.log.wake()
        return outputs

    def discard_step(self, step_id: int) -> None:
        """Consume a step without its rows; they stay in the pool, undelivered (L3, S3)."""
        with self._tables.lock:
            self._check_usable()
            step = self._tables.steps.take(step_id)
            self._plane.ring.give_up(step.page, f"step {step_id}")
            self._stats.steps_discarded += 1
        self._plane.committer.kick()

    def quiesce(self, timeout_s: float) -> None:
        """Wait until the log is drained, for graph capture, sleep and tests (S3)."""
        self._check_usable()
        self._log.wait_until(self._log.is_drained, "the log to drain", timeout_s=timeout_s)

    def stats(self) -> dict[str, object]:
        """Counters by name (O1), the log's length and age, and pool bytes per key."""
        length, age_s = self._log.length_and_age_s()
        pools = self._plane.pool.memory.copy()
        return {
            **asdict(self._stats),
            "log_length": length,
            "log_age_s": age_s,
            "pages_held": self._plane.ring.pages_held,
            "unconsumed_steps": self._tables.steps.ids(),
            "pages_stranded": len(self._plane.ring.stranded),
            "pool_bytes_by_key": {str(key): pool.reserved_bytes for key, pool in pools.items()},
        }

    def memory_stats(self) -> dict[str, int]:
        """Host bytes held now, by class."""
        return self._plane.memory_stats()

    def log_tail(self) -> list[str]:
        """The last operations of the log, oldest first, for reports."""
        return self._log.tail()

    def shutdown(self) -> None:
        """Finish or fail what is in flight, join the mover, free host memory (S3).

        Waits for busy consumers and launched copies, `device_wait_timeout_s` at most; memory that
        a copy may still use is then left to the process. Twice is harmless.
        """
        tables = self._tables
        with tables.lock:
            if tables.closed:
                return
            tables.closed = True
            tables.drafted = None
            if not tables.engine_busy:
                tables.abandon_open_step()
            self._saver.close_batch("shutdown")
            for step in tables.steps.take_idle():
                self._plane.ring.give_up(step.page, f"step {step.step_id}")
        self._plane.close(lambda: tables.steps.num_consuming + tables.engine_busy)

    # -- inside -----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._tables.check_open()
        self._log.raise_if_failed()

    def _check_ready(self) -> ModelCachePolicy:
        policy = self._policy
        if policy is None or self._tables.closed or self._log.failure:
            self._check_usable()
            raise StepStateError("no policy yet: call register_policy before the first step")
        return policy
