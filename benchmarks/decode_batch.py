"""A steady decode batch, the cache that serves it, and a builder thread that materializes it."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from measuring import times_blocked, times_preempted
from slotmirror import (
    AdmittedRequest,
    BlockTables,
    DeviceBackend,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
)

BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 4
POSITIONS = BLOCKS_PER_REQUEST * BLOCK_SIZE
STAGING_DEPTH = 8
DRAIN_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step on the engine thread: seconds, and how often it lost its core.

    blocked    by waiting, inside the cache's two calls; `blocked_in_all` in the whole step
    preempted  by the system, inside the two calls
    """

    adapter_s: float
    new_step_starts_s: float
    save_outputs_s: float
    cpu_s: float
    blocked: int
    blocked_in_all: int
    preempted: int

    @property
    def engine_s(self) -> float:
        """Wall time of the cache's own calls."""
        return self.new_step_starts_s + self.save_outputs_s


class DecodeBatch:
    """Every request decodes one token per step, `width` bf16 values for each of `keys` outputs.

    After `POSITIONS` steps the requests end and others take their blocks, so that the pool's pages
    are warm after one such round.

    With `spaced`, a step begins when mover and builder have finished the one before: they catch
    up while an engine runs its forward. Without, steps follow each other as fast as pages allow.
    """

    def __init__(
        self,
        requests: int,
        *,
        width: int,
        keys: int,
        committer: str,
        backend: DeviceBackend,
        spaced: bool,
    ) -> None:
        self._requests = requests
        self._ids: list[str] = []
        self._spaced = spaced
        num_blocks = requests * BLOCKS_PER_REQUEST
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            staging_capacity_tokens=max(requests, 64),
            staging_depth=STAGING_DEPTH,
            committer=committer,  # type: ignore[arg-type]
        )
        before = set(threading.enumerate())
        self.cache = PrefixCacheManager(config, backend)
        self.cache.register_policy(ModelCachePolicy())
        self._tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._hidden = torch.randn(requests, width, device=backend.device).to(torch.bfloat16)
        self._mm = {f"layer_{k}": self._hidden.clone() for k in range(keys - 1)}
        self._steps = 0
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._built: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
        self.builds: list[tuple[float, float]] = []
        """(wall, CPU) seconds of each `materialize`."""
        self.builder = threading.Thread(target=self._build, name="builder")
        self.builder.start()
        self.step()
        self.wait_until_idle()
        others = set(threading.enumerate()) - before - {self.builder}
        self.movers = sorted(others, key=lambda thread: thread.name)

    def step(self) -> StepTimes:
        """One step."""
        if self._spaced:
            self.wait_until_idle()
        blocked_before = times_blocked()
        clock = time.perf_counter
        changes = self._changes()
        scheduled = dict.fromkeys(self._ids, 1)
        computed = dict.fromkeys(self._ids, self._steps % POSITIONS)
        t0 = clock()
        events = self._tables.step(
            num_scheduled_tokens=scheduled, num_computed_tokens=computed, **changes
        )
        t1 = clock()
        blocked, preempted, cpu = times_blocked(), times_preempted(), time.thread_time()
        t2 = clock()
        self.cache.new_step_starts(events)
        t3 = clock()
        step_id = self.cache.save_outputs(
            self._hidden, self._mm, num_tokens_unpadded=len(self._ids)
        )
        t4 = clock()
        cpu = time.thread_time() - cpu
        blocked, preempted = times_blocked() - blocked, times_preempted() - preempted
        self._saved.put(step_id)
        self._steps += 1
        in_all = times_blocked() - blocked_before
        return StepTimes(t1 - t0, t3 - t2, t4 - t3, cpu, blocked, in_all, preempted)

    def wait_until_idle(self) -> None:
        """Wait until mover and builder have finished every step so far."""
        while len(self.builds) < self._steps:
            self.builds.append(self._built.get(timeout=DRAIN_TIMEOUT_S))
        self.cache.quiesce(DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """End the builder and the cache."""
        self._saved.put(None)
        self.builder.join()
        self.cache.shutdown()

    def _build(self) -> None:
        while (step_id := self._saved.get()) is not None:
            wall, cpu = time.perf_counter(), time.thread_time()
            self.cache.materialize(step_id)
            self._built.put((time.perf_counter() - wall, time.thread_time() - cpu))

    def _changes(self) -> dict[str, Any]:
        """Who ends, begins, and gets a block in the coming step."""
        block, within = divmod(self._steps % POSITIONS, BLOCK_SIZE)
        if within:
            return {}
        blocks = [[i * BLOCKS_PER_REQUEST + block] for i in range(self._requests)]
        if block:
            return {"appended": dict(zip(self._ids, blocks, strict=True))}
        ended, number = self._ids, self._steps // POSITIONS
        self._ids = [f"request-{number}-{i}" for i in range(self._requests)]
        pairs = zip(self._ids, blocks, strict=True)
        return {"ended": ended, "new": [AdmittedRequest(r, 0, ids) for r, ids in pairs]}
