"""What a decode step costs the engine thread, by part, at several batch sizes.

    python benchmarks/step_cost.py [--requests 16 256 1024] [--keys 1] [--steps 400]
                                   [--committer threaded] [--json FILE]

Every request decodes one token per step: 2048 bfloat16 hidden values and, per further key, as many
again. A builder thread materializes each step as it is saved. Reported are medians of microseconds
on the engine thread, the CPU time of all threads per step, and the growth from the first size to
the others beside the growth of the bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from slotmirror import (
    AdmittedRequest,
    BlockTables,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
    load_backend,
)

BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 64
WIDTH = 2048
WARM_STEPS = 50
DRAIN_TIMEOUT_S = 60
HEADINGS = (
    "requests",
    "keys",
    "adapter µs",
    "new_step_starts µs",
    "save_outputs µs",
    "engine thread µs",
    "growth",
    "growth of bytes",
    "CPU of all threads µs",
)


@dataclass(frozen=True)
class StepCost:
    """Medians of one batch size, microseconds per step."""

    requests: int
    keys: int
    adapter_us: float
    new_step_starts_us: float
    save_outputs_us: float
    cpu_all_threads_us: float
    page_waits: int

    @property
    def engine_us(self) -> float:
        """The cache's own calls on the engine thread."""
        return self.new_step_starts_us + self.save_outputs_us


class DecodeBatch:
    """A steady decode batch, the cache that serves it, and a builder thread."""

    def __init__(self, requests: int, keys: int, committer: str, backend_name: str | None) -> None:
        self._ids = [f"request-{i}" for i in range(requests)]
        num_blocks = requests * BLOCKS_PER_REQUEST
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            staging_capacity_tokens=max(requests, 64),
            staging_depth=8,
            committer=committer,  # type: ignore[arg-type]
        )
        backend = load_backend(backend_name)
        self.cache = PrefixCacheManager(config, backend)
        self.cache.register_policy(ModelCachePolicy())
        self._tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self._hidden = torch.randn(requests, WIDTH, device=backend.device).to(torch.bfloat16)
        self._mm = {f"layer_{k}": self._hidden.clone() for k in range(keys - 1)}
        self._position = 0
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._builder = threading.Thread(target=self._build, name="builder")
        self._builder.start()

    def _build(self) -> None:
        while (step_id := self._saved.get()) is not None:
            self.cache.materialize(step_id)

    def _new_blocks(self) -> dict[str, list[int]]:
        """The block that each request begins at this position, if it begins one."""
        if self._position % BLOCK_SIZE:
            return {}
        block = self._position // BLOCK_SIZE
        return {r: [i * BLOCKS_PER_REQUEST + block] for i, r in enumerate(self._ids)}

    def step(self) -> tuple[float, float, float]:
        """One step; seconds of the adapter, of `new_step_starts` and of `save_outputs`."""
        clock = time.perf_counter
        blocks = self._new_blocks()
        first = self._position == 0
        new = [AdmittedRequest(r, 0, ids) for r, ids in blocks.items()] if first else []
        scheduled = dict.fromkeys(self._ids, 1)
        computed = dict.fromkeys(self._ids, self._position)
        t0 = clock()
        events = self._tables.step(
            num_scheduled_tokens=scheduled,
            num_computed_tokens=computed,
            new=new,
            appended={} if first else blocks,
        )
        t1 = clock()
        self.cache.new_step_starts(events)
        t2 = clock()
        step_id = self.cache.save_outputs(
            self._hidden, self._mm, num_tokens_unpadded=len(self._ids)
        )
        t3 = clock()
        self._saved.put(step_id)
        self._position += 1
        # The engine has a forward to run between two steps; mover and builder catch up meanwhile.
        self.cache.quiesce(DRAIN_TIMEOUT_S)
        return t1 - t0, t2 - t1, t3 - t2

    def close(self) -> None:
        """End the builder and the cache."""
        self._saved.put(None)
        self._builder.join()
        self.cache.shutdown()


def measure(
    requests: int, keys: int, steps: int, committer: str, backend_name: str | None
) -> StepCost:
    """Run one batch size."""
    batch = DecodeBatch(requests, keys, committer, backend_name)
    try:
        for _ in range(WARM_STEPS):
            batch.step()
        cpu_s = time.process_time()
        times = [batch.step() for _ in range(steps)]
        cpu_s = time.process_time() - cpu_s
        adapter, starts, saves = (
            statistics.median(part) * 1e6 for part in zip(*times, strict=True)
        )
        waits = int(str(batch.cache.stats()["page_waits"]))
        return StepCost(requests, keys, adapter, starts, saves, cpu_s / steps * 1e6, waits)
    finally:
        batch.close()


def markdown(costs: list[StepCost]) -> str:
    """The table, growth counted from the first size."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for cost in costs:
        cells = (
            cost.requests,
            cost.keys,
            f"{cost.adapter_us:.0f}",
            f"{cost.new_step_starts_us:.0f}",
            f"{cost.save_outputs_us:.0f}",
            f"{cost.engine_us:.0f}",
            f"{cost.engine_us / costs[0].engine_us:.2f}×",
            f"{cost.requests / costs[0].requests:.0f}×",
            f"{cost.cpu_all_threads_us:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a Markdown table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description="Engine-thread cost of a decode step, by part.")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--committer", choices=["threaded", "inline"], default="threaded")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = [
        measure(requests, args.keys, args.steps, args.committer, args.backend)
        for requests in args.requests
    ]
    print(markdown(costs))
    if args.json:
        result = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "committer": args.committer,
            "costs": [asdict(cost) for cost in costs],
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
