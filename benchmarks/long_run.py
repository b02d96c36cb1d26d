"""Ten thousand steps of a mixed workload: what blocks the engine thread, and what memory grows.

    python benchmarks/long_run.py [--steps 10000] [--quick] [--json FILE]

Short requests that hit each other's blocks and take them over, decode, deferred codes, and prompts
in chunks, all at once (`workloads.recycling`). A builder thread materializes behind the engine
thread, which waits for nobody between steps: pages are what holds it back. The rows are wide, so
that copies, gathers and writes are under way all the time.

blocked   in how many steps the engine thread waited within `new_step_starts` and `save_outputs`,
          counted in the locks and conditions themselves: for a page or for device budget, which
          is allowed; otherwise, which would be a reader, a writer or an allocation; and for a lock
          that another thread held, with the longest such wait. Beside it the kernel's count of
          voluntary switches within the two calls, hand-offs of the GIL included
memory    resident memory beyond pool, pages, bounce buffers and recycled outputs, at the end
          against its size after a fifth of the steps; and the number of live Python objects
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from counting_runtime import CountingRuntime
from measuring import machine, resident_bytes, times_blocked
from slotmirror import (
    AdmittedRequest,
    BlockTables,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
    load_backend,
)
from tables import markdown_table
from workloads import BLOCK_SIZE, CODES_KEY, Step, recycling

LANES = 8
SHARED_BLOCKS = 8
CHUNK = 64
SAMPLES = 25
SETTLED_SHARE = 0.2
GROWTH_BYTES_MAX = 2 << 20
OWN_CLASSES = ("pool_bytes", "staging_bytes", "bounce_bytes", "idle_output_bytes")


@dataclass(frozen=True)
class Sample:
    """After so many steps, with nothing in flight."""

    steps: int
    resident_bytes: int
    own_bytes: int
    objects: int

    @property
    def beyond_bytes(self) -> int:
        """Resident memory that is not the cache's accounted own."""
        return self.resident_bytes - self.own_bytes


@dataclass(frozen=True)
class LongRun:
    """What was counted over all steps."""

    steps: int
    seconds: float
    switches: int
    page_waits: int
    budget_waits: int
    blocked_otherwise: int
    lock_waits: int
    lock_wait_us_max: float
    growth_bytes: int
    growth_objects: int
    samples: list[Sample]

    @property
    def is_flat(self) -> bool:
        """Memory of the last fifth is that after the first fifth, within noise."""
        return self.growth_bytes <= GROWTH_BYTES_MAX


class Engine:
    """The engine thread's side of one cache, and the builder."""

    def __init__(self, num_blocks: int, capacity_tokens: int) -> None:
        self._runtime = CountingRuntime()
        self.waits = self._runtime.counts
        self.cache = PrefixCacheManager(
            PrefixCacheConfig(
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                staging_depth=4,
                staging_capacity_tokens=capacity_tokens,
                device_staging_bytes_max=1 << 20,
            ),
            load_backend("cpu_ref"),
            self._runtime,
        )
        self.cache.register_policy(ModelCachePolicy(deferred_keys=frozenset({CODES_KEY})))
        self._tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._builder = threading.Thread(target=self._build, name="builder")
        self._builder.start()
        self.switches = 0
        self.blocked_otherwise = 0
        self._allowed_waits = 0

    def step(self, step: Step) -> None:
        """One step; counts what its two calls waited for."""
        events = self._tables.step(
            ended=step.ended,
            new=[AdmittedRequest(*facts) for facts in step.new],
            appended=step.appended,
            num_scheduled_tokens=dict(zip(step.req_ids, step.counts, strict=True)),
            num_computed_tokens=dict(zip(step.req_ids, step.first, strict=True)),
        )
        waits, switches = self.waits.condition_waits, times_blocked()
        self.waits.watching = True
        self.cache.new_step_starts(events)
        step_id = self.cache.save_outputs(step.hidden, step.mm, num_tokens_unpadded=step.num_tokens)
        self.waits.watching = False
        self.switches += times_blocked() - switches
        if self.waits.condition_waits > waits:
            allowed = sum(self.allowed_waits())
            self.blocked_otherwise += allowed == self._allowed_waits
            self._allowed_waits = allowed
        self._saved.put(step_id)

    def allowed_waits(self) -> tuple[int, int]:
        """Waits so far for a page, and for device budget."""
        stats = self.cache.stats()
        return int(str(stats["page_waits"])), int(str(stats["device_budget_waits"]))

    def sample(self, steps: int) -> Sample:
        """Memory now, once everything so far is over."""
        while self.cache.stats()["unconsumed_steps"]:
            time.sleep(0.0005)
        self.cache.quiesce(60)
        gc.collect()
        own = self.cache.memory_stats()
        return Sample(
            steps, resident_bytes(), sum(own[name] for name in OWN_CLASSES), len(gc.get_objects())
        )

    def close(self) -> None:
        """End builder and cache."""
        self._saved.put(None)
        self._builder.join()
        self.cache.shutdown()

    def _build(self) -> None:
        while (step_id := self._saved.get()) is not None:
            self.cache.materialize(step_id)


def run(steps: int) -> LongRun:
    """Every step, sampled `SAMPLES` times."""
    num_blocks = SHARED_BLOCKS + 4 * LANES + 8 * CHUNK // BLOCK_SIZE
    engine = Engine(num_blocks, 1024)
    samples: list[Sample] = []
    every = max(steps // SAMPLES, 1)
    started = time.perf_counter()
    try:
        workload = recycling(LANES, steps, shared_blocks=SHARED_BLOCKS, codes=True, chunk=CHUNK)
        for number, step in enumerate(workload, start=1):
            engine.step(step)
            if number % every == 0:
                samples.append(engine.sample(number))
        seconds = time.perf_counter() - started
        page_waits, budget_waits = engine.allowed_waits()
    finally:
        engine.close()
    settled = [s for s in samples if s.steps >= steps * SETTLED_SHARE]
    fifth = max(len(settled) // 4, 1)
    first, last = settled[:fifth], settled[-fifth:]
    return LongRun(
        steps,
        seconds,
        engine.switches,
        page_waits,
        budget_waits,
        engine.blocked_otherwise,
        engine.waits.lock_waits,
        engine.waits.lock_wait_s_max * 1e6,
        _median(last, "beyond_bytes") - _median(first, "beyond_bytes"),
        _median(last, "objects") - _median(first, "objects"),
        samples,
    )


def _median(samples: list[Sample], field: str) -> int:
    return int(statistics.median(getattr(sample, field) for sample in samples))


def markdown(found: LongRun) -> str:
    """Both tables."""
    waits = markdown_table(
        (
            *("steps", "waits for a page", "for budget", "otherwise", "for a lock"),
            *("the longest, µs", "voluntary switches"),
        ),
        [
            (
                *(f"{found.steps:,}", found.page_waits, found.budget_waits),
                *(found.blocked_otherwise, found.lock_waits, f"{found.lock_wait_us_max:.0f}"),
                found.switches,
            )
        ],
    )
    picked = found.samples[:: max(len(found.samples) // 5, 1)]
    memory = markdown_table(
        ("after steps", "resident MiB", "pool, pages, outputs MiB", "beyond MiB", "objects"),
        [
            (
                f"{s.steps:,}",
                *(f"{n / 2**20:.1f}" for n in (s.resident_bytes, s.own_bytes, s.beyond_bytes)),
                f"{s.objects:,}",
            )
            for s in picked
        ],
    )
    return (
        f"{waits}\n\n{memory}\n\nGrowth after the first fifth: {found.growth_bytes / 1024:+,.0f} "
        f"KiB, {found.growth_objects:+,} objects."
    )


def main() -> None:
    """Run, print the tables, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Waits and memory over many steps.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="1,500 steps")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = run(1500 if args.quick else args.steps)
    print(markdown(found))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **asdict(found)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
