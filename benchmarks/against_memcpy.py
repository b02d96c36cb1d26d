"""What we move beside plain copies of the same bytes.

    python benchmarks/against_memcpy.py [--rounds 30] [--backend cpu_ref] [--json FILE]

Rows are 2048 bf16 values (4 KiB). Ours and the copy take turns; figures are medians, and beside
their ratio stands that of the lower deciles, which a busy machine disturbs less. One torch thread.

Destinations are *reused* (touched before, rotated like ours, so that none is in the processor's
cache for one side alone) or *fresh*: mapped for this call, huge pages advised as NumPy does, every
page touched for the first time. Our outputs are fresh because all former ones are kept. The system
gets that memory ready beforehand: on a virtual machine, memory that no process ever used costs ten
times as much, which would hit one side only.

scatter, gather   the backend's calls alone against one copy into as many contiguous rows. Slots of
                  256 rows lie apart, as 256 requests decode; 8,192 rows are whole blocks, shuffled
save              `save_outputs` on the engine thread, against one copy into a reused page
materialize       the builder's call, against one copy into equally fresh memory
prefill           `new_step_starts`, `save_outputs`, `materialize` and the mover's write: the CPU
                  time of all threads. The work needs three copies (page, pool, output), so "over
                  one copy into equally fresh memory (three copies …)" is read as: over those three
                  plain copies, page and pool reused as ours are, the output as fresh as ours. The
                  other reading, over a single copy, stands beside it: `copies` says which is which
hit               the mover's and the builder's CPU time of a step with a hit of 8,192 rows (16 more
                  are computed), against one copy of the hit's bytes into equally fresh memory
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from copies import (
    WARM_ROUNDS,
    Comparison,
    Destinations,
    Rows,
    Seconds,
    compare,
    copy_chain,
    one_copy,
    timed,
    touched,
)
from measuring import cpu_s_of, machine
from peers.ours import STAGING_DEPTH, Ours
from slotmirror import DeviceBackend, load_backend
from tables import markdown_table
from workloads import BLOCK_SIZE, Step, hits, prefill

TOKENS = 8192
DECODE_REQUESTS = 256
POOL_ROWS = TOKENS
FRESH_ROUNDS_MAX = 12
FRESH_STEPS_MAX = 2 * (WARM_ROUNDS + FRESH_ROUNDS_MAX)

# -- the backend's calls ---------------------------------------------------------------------------


def slots_of_decode(number: int) -> npt.NDArray[np.int64]:
    """The slots of 256 requests whose blocks lie apart, at the `number`-th position."""
    apart = POOL_ROWS // DECODE_REQUESTS
    return np.arange(DECODE_REQUESTS, dtype=np.int64) * apart + number % apart


def slots_of_blocks(number: int) -> npt.NDArray[np.int64]:
    """The slots of 8,192 tokens in shuffled blocks, another shuffle for each `number`."""
    blocks = np.random.default_rng(number).permutation(POOL_ROWS // BLOCK_SIZE)
    first = blocks[: TOKENS // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    return (first[:, None] + np.arange(BLOCK_SIZE, dtype=np.int64)).reshape(-1)


def row_moves(backend: DeviceBackend, rounds: int) -> Iterator[Comparison]:
    """Scatter and gather of 256 and of 8,192 rows.

    A pool is long in use, so rows are scattered into reused memory; the fresh pool of 8,192 rows
    is the very first prompt's.
    """
    for rows, slots_of in ((DECODE_REQUESTS, slots_of_decode), (TOKENS, slots_of_blocks)):
        source, stretches = touched(rows), POOL_ROWS // rows
        for fresh in (False, True) if rows == POOL_ROWS else (False,):
            pools = Destinations(POOL_ROWS, fresh=fresh)
            ours = _moves(
                lambda n, p=pools, s=source, f=slots_of: (p.take(), f(n), s), backend.scatter_slots
            )
            copy = _moves(lambda n, p=pools, s=source, k=stretches: (p.take(), n % k, s), _put)
            yield from compare("scatter", rows, _name(fresh), ours, {1: copy}, rounds)
        pool = touched(POOL_ROWS)
        for fresh in (False, True):
            outs, others = (Destinations(rows, fresh=fresh, count=4) for _ in range(2))
            ours = _moves(
                lambda n, p=pool, o=outs, f=slots_of: (p, f(n), o.take()), backend.gather_slots
            )
            copy = _moves(lambda n, p=pool, o=others, k=stretches: (p, n % k, o.take()), _get)
            yield from compare("gather", rows, _name(fresh), ours, {1: copy}, rounds)


def _name(fresh: bool) -> str:
    return "fresh" if fresh else "reused"


def _moves(arguments: Callable[[int], tuple[object, ...]], move: Callable[..., None]) -> Seconds:
    """Times `move` alone; its arguments are prepared beforehand, anew for each call."""
    number = 0

    def run() -> float:
        nonlocal number
        number += 1
        prepared = arguments(number)
        return timed(lambda: move(*prepared), time.thread_time)

    return run


def _put(pool: Rows, stretch: int, rows: Rows) -> None:
    pool[stretch * len(rows) : (stretch + 1) * len(rows)] = rows


def _get(pool: Rows, stretch: int, out: Rows) -> None:
    out[:] = pool[stretch * len(out) : (stretch + 1) * len(out)]


# -- whole steps -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step: CPU of all threads, of the mover and `materialize`, and of three calls."""

    all_threads: float
    mover: float
    save: float
    materialize: float


class Served:
    """Serves a sequence of steps, and keeps every output if they shall lie in fresh memory."""

    def __init__(self, steps: Iterator[Step], num_blocks: int, *, keep: bool) -> None:
        before = set(threading.enumerate())
        self._cache = Ours(num_blocks, BLOCK_SIZE, TOKENS, None)
        self._steps = steps
        self._kept: list[object] = []
        self._keep = keep
        if keep:
            touched(FRESH_STEPS_MAX * TOKENS)
        self.step()
        self._movers = set(threading.enumerate()) - before

    def step(self) -> StepSeconds:
        """The next step, to its end on every thread."""
        step = next(self._steps)
        self._cache.prepare(step)
        movers = getattr(self, "_movers", set())
        mover = sum(cpu_s_of(thread) for thread in movers)
        all_threads = time.process_time()
        self._cache.start()
        marks = [time.thread_time()]
        step_id = self._cache.save(step)
        marks.append(time.thread_time())
        outputs = self._cache.materialize(step_id, step)
        marks.append(time.thread_time())
        self._cache.settle()
        all_threads = time.process_time() - all_threads
        mover = sum(cpu_s_of(thread) for thread in movers) - mover
        if self._keep:
            self._kept.append(outputs)
        return StepSeconds(all_threads, mover, marks[1] - marks[0], marks[2] - marks[1])

    def close(self) -> None:
        """End the cache, and drop what was kept."""
        self._kept.clear()
        self._cache.close()


def whole_steps(rounds: int) -> Iterator[Comparison]:
    """Prefill and hit of 8,192 rows, and the two calls within the prefill."""
    source = touched(TOKENS)
    for fresh in (False, True):
        destinations = _name(fresh)
        rounds = min(rounds, FRESH_ROUNDS_MAX) if fresh else rounds
        total = WARM_ROUNDS + rounds + 1
        pages = Destinations(TOKENS, fresh=False, count=STAGING_DEPTH)
        outputs = [Destinations(TOKENS, fresh=fresh) for _ in range(4)]
        served = Served(prefill(TOKENS, 1, total), TOKENS // BLOCK_SIZE, keep=fresh)
        seen: list[StepSeconds] = []

        def step(served: Served = served, seen: list[StepSeconds] = seen) -> float:
            seen.append(served.step())
            return seen[-1].all_threads

        copies = {
            3: copy_chain(source, pages, touched(TOKENS), outputs[0]),
            1: one_copy(source, outputs[1]),
        }
        yield from compare("prefill", TOKENS, destinations, step, copies, rounds)
        served.close()
        yield from _calls(seen, source, pages, outputs[2], destinations, rounds)
        served = Served(hits(TOKENS, 1, total), TOKENS // BLOCK_SIZE + 8, keep=fresh)

        def hit(served: Served = served) -> float:
            seconds = served.step()
            return seconds.mover + seconds.materialize

        copy = one_copy(source, outputs[3])
        yield from compare("hit", TOKENS, destinations, hit, {1: copy}, rounds)
        served.close()


def _calls(
    seen: list[StepSeconds],
    source: Rows,
    pages: Destinations,
    outputs: Destinations,
    destinations: str,
    rounds: int,
) -> Iterator[Comparison]:
    """The engine's call and the builder's, out of the prefill steps that were measured already."""
    saves, builds = iter([s.save for s in seen]), iter([s.materialize for s in seen])
    if destinations == "reused":
        copy = one_copy(source, pages)
        yield from compare("save", TOKENS, "reused", lambda: next(saves), {1: copy}, rounds)
    copy = one_copy(source, outputs)
    yield from compare("materialize", TOKENS, destinations, lambda: next(builds), {1: copy}, rounds)


def markdown(found: list[Comparison]) -> str:
    """The table."""
    return markdown_table(
        ("measure", "rows", "destinations", "ours µs", "plain copies", "they take µs", "ours ÷",
         "lower deciles ÷"),
        [
            (
                c.name,
                f"{c.rows:,}",
                c.destinations,
                f"{c.ours_us:,.0f}",
                c.copies,
                f"{c.copy_us:,.0f}",
                f"{c.ratio:.2f}",
                f"{c.ratio_low:.2f}",
            )
            for c in found
        ],
    )  # fmt: skip


def run(backend: DeviceBackend, rounds: int) -> list[Comparison]:
    """Everything."""
    return [*row_moves(backend, rounds), *whole_steps(rounds)]


def main() -> None:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Our moves beside plain copies.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="8 rounds")
    parser.add_argument("--backend", default="cpu_ref")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = run(load_backend(args.backend), 8 if args.quick else args.rounds)
    print(markdown(found))
    if args.json:
        figures = {"machine": machine(), "comparisons": [asdict(c) for c in found]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
