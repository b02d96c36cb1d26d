"""Many runs: each from its own seed, counted, and the first failure kept with what replays it."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from slotmirror.conformance.explorer.choices import SeededChoices
from slotmirror.conformance.explorer.core_insides import small_outputs_recycled
from slotmirror.conformance.explorer.faults import Trouble, draw_fault
from slotmirror.conformance.explorer.run import ExploredRun, RunFailure, RunOptions, RunResult
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.simulated import PROFILES
from slotmirror.conformance.traces.generate import TraceOptions, draw_trace
from slotmirror.conformance.traces.scenarios import scenarios
from slotmirror.conformance.traces.trace import Trace

SCHEDULES_PER_TRACE = 4
_COLLECT_EVERY = 500
_WRITTEN_EVERY = 12


@dataclass(slots=True)
class ExploreReport:
    """What a search has seen."""

    first_seed: int
    faults: bool
    schedules: int = 0
    seconds: float = 0.0
    points: int = 0
    switches: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    log_orders: set[int] = field(default_factory=set)
    failed_seed: int | None = None
    failure: str = ""

    @property
    def schedules_per_s(self) -> float:
        """Schedules per second of the search."""
        return self.schedules / self.seconds if self.seconds else 0.0

    def add(self, other: ExploreReport) -> None:
        """Count another search too; the first failure stays."""
        self.schedules += other.schedules
        self.points += other.points
        self.switches += other.switches
        self.counts += other.counts
        self.log_orders |= other.log_orders
        if self.failed_seed is None and other.failed_seed is not None:
            self.failed_seed, self.failure = other.failed_seed, other.failure
            self.faults = other.faults

    def to_json(self) -> dict[str, object]:
        """For machines."""
        return {
            "first_seed": self.first_seed,
            "faults": self.faults,
            "schedules": self.schedules,
            "seconds": round(self.seconds, 3),
            "schedules_per_s": round(self.schedules_per_s, 1),
            "schedule_points": self.points,
            "thread_switches": self.switches,
            "distinct_log_orders": len(self.log_orders),
            "counts": dict(sorted(self.counts.items())),
            "failed_seed": self.failed_seed,
            "failure": self.failure,
        }


Progress = Callable[[ExploreReport], None]


def explore(
    first_seed: int,
    schedules: int,
    *,
    faults: bool = False,
    seconds_max: float | None = None,
    progress: Progress = lambda _: None,
) -> ExploreReport:
    """Run the seeds from `first_seed` on, for `seconds_max` at most.

    Stops at the first failure, which the report has, with the seed that replays it.
    """
    report = ExploreReport(first_seed, faults)
    started = time.monotonic()
    with quiet_runs():
        for seed in range(first_seed, first_seed + schedules):
            try:
                _add(report, run_seed(seed, faults=faults))
            except RunFailure as failure:
                report.failed_seed, report.failure = seed, str(failure)
            report.seconds = time.monotonic() - started
            late = seconds_max is not None and report.seconds >= seconds_max
            if report.failed_seed is not None or late:
                break
            if report.schedules % _COLLECT_EVERY == 0:
                gc.collect()
                progress(report)
    return report


def _add(report: ExploreReport, result: RunResult) -> None:
    report.schedules += 1
    report.points += result.points
    report.switches += result.switches
    report.counts += result.counts
    report.log_orders.add(result.log_order)


def run_seed(seed: int, *, faults: bool = False) -> RunResult:
    """The one run of this seed; raises `RunFailure`."""
    rng = random.Random(seed * 2 + faults)
    trace, happens = _trace(seed // SCHEDULES_PER_TRACE)
    fault = draw_fault(rng) if faults else None
    impatient = fault is not None and fault.kind is Trouble.TIME_OUT
    profile = PROFILES[rng.choice(sorted(PROFILES))]
    options = RunOptions(
        builders=rng.choice([1, 1, 2, 3]),
        profile=profile,
        device_outputs=rng.choice([0.0, 0.3, 1.0]) if profile.device_copies else 0.0,
        early_shutdown=rng.random() < 0.15,
        fault=fault,
    )
    trace = replace(trace, config=replace(trace.config, pin_outputs=rng.random() < 0.3))
    choices = SeededChoices(rng.randrange(1 << 62), impatient=impatient)
    result = ExploredRun(trace, choices, rng.randrange(1 << 62), options).play()
    result.counts += happens
    return result


@functools.lru_cache(maxsize=1)
def _trace(seed: int) -> tuple[Trace, Counter[str]]:
    """A drawn trace, or one that was written by hand every now and then."""
    if seed % _WRITTEN_EVERY == 0:
        written = tuple(scenarios().values())
        return written[seed // _WRITTEN_EVERY % len(written)], Counter()
    steps = random.Random(seed).choice([4, 6, 8, 10])
    return draw_trace(seed, TraceOptions(steps=steps))


@contextmanager
def quiet_runs() -> Iterator[None]:
    """No log lines of runs in which things fail on purpose; small output buffers recycled too;
    the collector only between runs.

    A collection in the middle of a run would free device memory at a moment that no seed knows.
    """
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with quiet_core(), small_outputs_recycled():
            yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
