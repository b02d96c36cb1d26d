"""The cache that an engine's adapter talks to.

Threads: `new_step_starts`, `save_outputs`, `preallocate` and `reset` belong to the engine thread;
`materialize` and `discard_step` may be called from any thread, as may the rest.
Locks: the manager lock covers the tables, the open step and the unconsumed steps; the log lock is
taken inside it only to append. Neither is held across a wait, a copy, an allocation or a backend
call (T4, T5). The engine thread waits for a staging page and for nothing else (T1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.consumers import StepConsumers
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.deferred import DeferredRows
from slotmirror.core.errors import CacheShutDownError, StepStateError
from slotmirror.core.events import Int64Array, StepEvents
from slotmirror.core.hit_planning import HitPlanner, check_shape, check_slots, missing_rows
from slotmirror.core.hit_registry import HitRegistry
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.memory_plan import MemoryPlan, plan_memory
from slotmirror.core.merge import StageOutputs
from slotmirror.core.open_keys import OpenKeys
from slotmirror.core.oplog import Operation
from slotmirror.core.page_transfer import StagedStep
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.runtime import Runtime, ThreadRuntime
from slotmirror.core.slot_table import SlotTable
from slotmirror.core.split import split_outputs
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import Step, StepLayout
from slotmirror.core.unconsumed import UnconsumedSteps


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
        self._lock = runtime.lock("manager")
        self._plane = DataPlane(config, backend, runtime, self._stats)
        self._log = self._plane.log
        self._slots = SlotTable(config.num_slots)
        self._registry = HitRegistry(config.num_blocks, config.block_size)
        self._keys = OpenKeys(
            config,
            self._plane.pool,
            self._plane.ring,
            self._plane.bounces,
            self._slots,
            self._lock,
        )
        self._planner = HitPlanner(self._plane.buffers, self._plane.meter, self._stats)
        self._deferred = DeferredRows(config.num_slots, self._stats)
        self._steps = UnconsumedSteps()
        self._consumers = StepConsumers(
            self._lock, self._steps, self._registry, self._plane, self._stats
        )
        self._policy: ModelCachePolicy | None = None
        self._open: Step | None = None
        self._drafted: Step | None = None
        self._epoch = 0
        self._closed = False

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
        return plan_memory(self.config, [key.spec for key in self._keys.all()], deferred)

    # -- the engine thread ------------------------------------------------------------------

    def new_step_starts(self, events: StepEvents) -> None:
        """Claim this step's slots, register its hits and start reading them (C1, C2).

        Once per real step, before the forward, also for steps with ended requests and no tokens
        (L6). Raises `HitSpanError` (D4), `RowLayoutError` (S4), `UnknownRequestError` and
        `HostMemoryLimitError` (M3) with nothing changed; the engine must then not run the step.
        """
        policy = self._check_ready()
        check_shape(events)
        with self._lock:
            accepted = self._accepted_ends(events)
            plan = self._registry.plan(events)
            check_slots(events, self.config)
            hit_rows = self._slots.plan_hits(events.slots, plan.spans.slots)
        layout = StepLayout(events, plan.spans, hit_rows)
        gathers = self._planner.gathers(layout, self._keys.all())
        needs_hidden = policy.needs_full_hidden_states
        missing = missing_rows(layout, self._keys.get(HIDDEN_KEY)) if needs_hidden else []
        with self._lock:
            self._settle_drafts(accepted)
            self._abandon_open_step()
            closing = self._deferred.reason_to_close(events, plan.spans.slots)
            self._log.append(self._closed_batch(closing))
            owners = self._registry.apply(events, plan)
            self._slots.claim(events.slots)
            self._deferred.kill(events.slots)
            replays = self._registry.replays(owners, layout.region_first)
            step_id = self._stats.steps_started = self._stats.steps_started + 1
            if events.total_tokens:
                self._open = Step(
                    step_id=step_id,
                    layout=layout,
                    gathers=gathers,
                    missing=missing,
                    epoch=self._epoch,
                    owners=owners,
                    replays=replays,
                    drafted=layout.indices_of(events.drafted),
                    ends=layout.ends,
                )
            if self.config.prefetch:
                self._log.append(list(gathers.values()))
        self._plane.committer.kick()
        self._stats.hits += layout.num_hits
        self._stats.hit_tokens += len(hit_rows.slots)
        self._stats.own_step_hit_tokens += layout.num_own_hit_rows

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
        The tensors may be overwritten as soon as it returns (D9). Waits for a staging page,
        bounded (S1). Until it returns nothing has changed: the step stays open and the save may
        be repeated, for instance without the key that it refused (C3).
        """
        policy, step = self._check_open()
        padded = num_tokens_unpadded if num_tokens_padded is None else num_tokens_padded
        step.layout.check_counts(num_tokens_unpadded, padded)
        order = step.layout.row_order(req_ids)
        split = split_outputs(hidden, mm_outputs, num_tokens_unpadded, padded, policy)
        step.saved_keys = self._keys.open(split.specs(), policy.deferred_keys)
        step.leftovers = LeftoverPack(split.leftovers) if split.leftovers else None
        deferred = self._plane.transfer.deferrable(split.rows, split.deferred)
        reserved = self._reserve(sum(split.rows[name].nbytes for name in deferred))
        try:
            staged = self._plane.transfer.stage(
                split.rows, deferred, step.leftovers, num_tokens_unpadded, self._steps.ids
            )
        except BaseException:
            self._plane.budget.release(reserved)
            raise
        slots = step.layout.order_rows(order)
        write = self._plane.write_of(step, staged, slots)
        with self._lock:
            self._registry.note_saved(step.owners, step.layout.ends)
            step.delivered_before = self._registry.delivered_ends(step.owners)
            late = () if self.config.prefetch else step.gathers.values()
            self._log.append([*late, *write, *self._keep(step, staged, slots, reserved)])
            self._open = None
            self._drafted = step if len(step.drafted) else None
            self._steps.add(step)
        self._plane.committer.kick()
        self._stats.steps_saved += 1
        self._stats.tokens_saved += num_tokens_unpadded
        return step.step_id

    def reset(self) -> None:
        """Forget every row: the engine's cache was reset, or its weights changed (R1).

        Steps in flight are delivered as they are; a step that is open now is delivered but not
        kept. Memory stays.
        """
        self._check_usable()
        with self._lock:
            self._slots.clear()
            self._epoch += 1
            if self._deferred.num_bytes:
                self._plane.budget.release(self._deferred.close("reset").num_bytes)

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
        self._check_usable()
        return self._consumers.materialize(step_id, req_ids, device=device)

    def discard_step(self, step_id: int) -> None:
        """Consume a step without its rows; they stay in the pool, undelivered (L3, S3)."""
        self._check_usable()
        self._consumers.discard(step_id)

    def quiesce(self, timeout_s: float) -> None:
        """Wait until the log is drained, for graph capture, sleep and tests (S3)."""
        self._check_usable()
        self._log.wait_until(self._log.is_drained, "the log to drain", timeout_s=timeout_s)

    def stats(self) -> dict[str, object]:
        """Counters by name (O1), the log's length and age, and pool bytes per key."""
        length, age_s = self._log.length_and_age_s()
        return {
            **self._stats.snapshot(),
            "log_length": length,
            "log_age_s": age_s,
            "pages_held": self._plane.ring.pages_held,
            "unconsumed_steps": self._steps.ids(),
            "pool_bytes_by_key": self._plane.pool.bytes_by_key,
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
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drafted = None
            self._abandon_open_step()
            self._log.append(self._closed_batch("shutdown"))
            self._log.append([self._plane.release_of(step) for step in self._steps.close()])
        self._plane.committer.kick()
        self._plane.close(lambda: self._steps.num_consuming)

    # -- inside -----------------------------------------------------------------------------

    def _reserve(self, num_bytes: int) -> int:
        """Reserve device bytes for this step's deferred clones, before they are made (W4)."""
        if num_bytes:
            if not self._plane.budget.fits(num_bytes):
                with self._lock:
                    self._log.append(self._closed_batch("budget"))
                self._plane.committer.kick()
            self._plane.budget.reserve(num_bytes)
        return num_bytes

    def _keep(
        self, step: Step, staged: StagedStep, slots: Int64Array, reserved: int
    ) -> list[Operation]:
        """Mark the step's rows present and its deferred ones open. Caller holds lock.

        Rows of a step that was open at a reset are not kept (R1).
        """
        if step.epoch != self._epoch:
            self._plane.budget.release(reserved)
            return []
        self._slots.mark_written(slots, [key.index for key in step.saved_keys])
        clones = {
            key: staged.deferred[key.spec.name]
            for key in step.saved_keys
            if key.spec.name in staged.deferred
        }
        if clones:
            self._deferred.add(clones, slots, step.layout.req_ids)
        half = self._plane.budget.is_half_full(self._deferred.num_bytes)
        return self._closed_batch("budget" if half else None)

    def _closed_batch(self, reason: str | None) -> list[Operation]:
        """Close the open batch for this reason, if there are both. Caller holds lock."""
        if reason is None or not self._deferred.num_bytes:
            return []
        return [self._plane.deferred_write_of(self._deferred.close(reason))]

    def _accepted_ends(self, events: StepEvents) -> Int64Array | None:
        """Where the drafts of the step before end (L7); changes nothing. Caller holds lock."""
        if self._drafted is None:
            return None
        return self._drafted.verified_ends(events.verified_positions)

    def _settle_drafts(self, accepted: Int64Array | None) -> None:
        """Rejected drafts are never delivered, and are saved again. Caller holds lock."""
        step, self._drafted = self._drafted, None
        if step is not None and accepted is not None:
            self._registry.note_verified(step.owners[step.drafted], accepted)
            step.settle_drafts(accepted)

    def _abandon_open_step(self) -> None:
        """The open step's save will never come: its slots stay absent (C3). Caller holds lock."""
        if self._open is not None:
            self._registry.release(self._open.owners)
            self._open = None
            self._stats.steps_abandoned += 1

    def _check_usable(self) -> None:
        if self._closed:
            raise CacheShutDownError("this cache was shut down; make a new manager")
        self._log.raise_if_failed()

    def _check_ready(self) -> ModelCachePolicy:
        self._check_usable()
        if self._policy is None:
            raise StepStateError("no policy yet: call register_policy before the first step")
        return self._policy

    def _check_open(self) -> tuple[ModelCachePolicy, Step]:
        policy = self._check_ready()
        if self._open is None:
            raise StepStateError(
                "save_outputs without an open step: call new_step_starts first, once per step; "
                "warm-up, profiling and graph-capture runs must not be saved"
            )
        return policy, self._open
