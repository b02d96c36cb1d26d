"""Everything that moves or holds rows, put together, and its life from first use to shutdown.

The manager decides what is to be moved; this side moves it: log and mover, pages, pool, output
buffers. Nothing here knows of requests' lives or of the manager's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.buffers import OutputBuffers
from slotmirror.core.committer import Committer
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.copy_target import CopyTarget
from slotmirror.core.deferred import DeferredBatch, DeviceBudget
from slotmirror.core.deferred_write import BounceBuffers, DeferredWriteTask
from slotmirror.core.device_outputs import DeviceOutputs
from slotmirror.core.direct_capture import DirectCapture
from slotmirror.core.errors import DeviceError, GatherFailedError, WaitTimeoutError
from slotmirror.core.events import Int64Array, StepEvents
from slotmirror.core.hits import Hits
from slotmirror.core.operations import GatherTask, WriteTask
from slotmirror.core.oplog import Operation, OpLog, logger
from slotmirror.core.runtime import Runtime
from slotmirror.core.staging import StagingPage, StagingRing
from slotmirror.core.stats import CacheStats
from slotmirror.core.step import Step
from slotmirror.core.write_task import TaskProgress, TaskState


class DataPlane:
    """The parts that move rows; each method says which thread it is for."""

    def __init__(
        self, config: PrefixCacheConfig, backend: DeviceBackend, runtime: Runtime, stats: CacheStats
    ) -> None:
        self.config = config
        self.backend = backend
        self.stats = stats
        self._task_lock = runtime.lock("task")
        self.log = OpLog(config, runtime, stats)
        self.committer = Committer(self.log, backend, config)
        self.ring = StagingRing(config, backend, self.log)
        pinning = backend if config.pin_outputs else None
        self.buffers = OutputBuffers(pinning, config.hit_buffer_bytes_max)
        self.device_outputs = DeviceOutputs(backend)
        self.pool = CopyTarget("the pool", backend)
        """The durable rows of every key; copies land in it only with direct capture."""
        self.bounces = BounceBuffers(config, backend)
        self.budget = DeviceBudget(self.log, config.device_staging_bytes_max)

    def gathers_of(
        self, events: StepEvents, hits: Hits, keys: Iterable[OpenKey]
    ) -> dict[str, GatherTask]:
        """A step's reads, planned when it starts (C2): by name, one for each key that has a row
        anywhere in its hit spans.

        Engine thread, for a step with hits; allocates, so it is called without locks. Raises
        `HostMemoryLimitError` before anything is allocated (M3).
        """
        wanted = [key for key in keys if hits.present[:, key.index].any()]
        # Outputs that have reached the device are not alive any more (M3).
        self.device_outputs.forget_finished()
        out_rows = events.total_tokens + len(hits)
        self.buffers.check_hits(sum(out_rows * key.spec.row_bytes for key in wanted))
        # One index for the whole region of the hits: rows that are not the pool's are read from
        # some slot, and then zeroed or overwritten from the page.
        slots = np.zeros(hits.region_rows, dtype=np.int64)
        slots[hits.out_rows] = hits.spans.slots
        whose = f"for {len(hits.spans.request)} hits"
        gathers = {}
        for key in wanted:
            lease = self.buffers.lease(out_rows * key.spec.row_bytes, for_hits=True)
            absent = hits.out_rows[~hits.present[:, key.index]]
            count = len(hits) - len(absent)
            gathers[key.name] = GatherTask(whose, key, slots, absent, count, lease, self.stats)
        alive = self.buffers.hit_bytes_alive
        self.stats.hit_buffer_bytes_high = max(self.stats.hit_buffer_bytes_high, alive)
        return gathers

    def write_of(
        self,
        step_id: int,
        sources: Mapping[OpenKey, torch.Tensor],
        page: StagingPage,
        slots: Int64Array,
    ) -> list[Operation]:
        """The step's write, if it has rows to keep; to be appended once it holds the page."""
        if not sources:
            return []
        progress = TaskProgress("write of a step", self._task_lock)
        progress.advance(TaskState.QUEUED)
        direct = self._direct_capture(sources, slots)
        targets = (page,) if direct is None else (direct.target, page)
        keys, let_go = tuple(sources), self.ring.let_go
        return [
            WriteTask(progress, targets, self.stats, step_id, keys, slots, page, let_go, direct)
        ]

    def _direct_capture(
        self, sources: Mapping[OpenKey, torch.Tensor], slots: Int64Array
    ) -> DirectCapture | None:
        """The part of a write that skips the page; only clones may be read that late."""
        rows_min = self.config.direct_capture_rows_min
        if rows_min is None or not self.backend.capabilities.async_copy:
            return None
        if not all(map(self.backend.owns, sources.values())):
            return None
        streams = (self.bounces.stream(), self.ring.stream())
        capture = DirectCapture(self.pool, streams, sources, slots, rows_min)
        return capture if capture.num_rows else None

    def deferred_write_of(self, batch: DeferredBatch) -> DeferredWriteTask:
        """The write of a closed batch; to be appended at once."""
        progress = TaskProgress("write of a deferred batch", self._task_lock)
        progress.advance(TaskState.QUEUED)
        # Every clone was read by a copy on the page stream, so what that stream has done, the
        # clone's own work included, is done.
        after, release = self.ring.stream(), self.budget.release
        both = self.bounces.both
        return DeferredWriteTask(progress, both, self.stats, batch, self.bounces, after, release)

    def await_rows(self, step: Step) -> None:
        """Wait, bounded, until the step's copy and reads are over; any thread, no locks (T2).

        Raises `WaitTimeoutError` (W6), `DeviceError`, and `GatherFailedError` (W5).
        """
        self.backend.bind_thread(self.backend.device)
        limit_s = self.config.device_wait_timeout_s
        if step.page.issued:
            try:
                arrived = step.page.fence.wait(limit_s)
            except Exception as error:
                raise DeviceError(f"the copy of step {step.step_id} failed: {error}") from error
            if not arrived:
                raise WaitTimeoutError(
                    f"the device has not finished the copy of step {step.step_id} in {limit_s:g} s "
                    f"(device_wait_timeout_s); {self.log.report()}"
                )
            step.page.end()
        if step.gathers:
            last = max(gather.seq for gather in step.gathers.values())
            self.log.wait_until(self.log.is_completed(last), f"the hit rows of step {step.step_id}")
        for gather in step.gathers.values():
            if gather.failure is not None:
                raise GatherFailedError(step.step_id, gather.key.spec.name, gather.failure)

    def close(self, busy_consumers: Callable[[], int]) -> None:
        """Finish or drop what is queued, join the mover, free host memory (S3).

        Refuses further pages and wakes whoever waits for one. Bounded by `device_wait_timeout_s`,
        and so are the mover's fence waits; memory that a copy or a consumer may still use is then
        left to the process.
        """
        limit_s = self.config.device_wait_timeout_s
        self.ring.refuse_claims()
        self.committer.abandon_after(limit_s)
        self.committer.kick()
        try:
            self.log.wait_until(
                lambda: self.log.is_drained() and not busy_consumers(),
                "copies and consumers to end",
                through_failure=True,
                timeout_s=limit_s,
            )
        except WaitTimeoutError as error:
            logger.error("shut down with work in flight: %s", error)
        self.log.stop()
        if self.committer.join(self.config.staging_claim_timeout_s):
            for target in (self.pool, *self.bounces.both):
                target.close()
        self.ring.close()
        if self.device_outputs.forget_finished(limit_s):
            self.buffers.close()

    def memory_stats(self) -> dict[str, int]:
        """Host bytes held now, by class."""
        return {
            "pool_bytes": self.pool.reserved_bytes,
            **self.ring.memory_stats(),
            "bounce_bytes": sum(bounce.reserved_bytes for bounce in self.bounces.both),
            "deferred_device_bytes": self.budget.bytes_reserved,
            "hit_output_bytes": self.buffers.hit_bytes_alive,
            "idle_output_bytes": self.buffers.idle_bytes,
        }
