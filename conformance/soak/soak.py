"""Rounds of traces on real threads, one cache for some rounds and then the next."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from slotmirror.conformance.explorer.builder_actor import BuilderActor
from slotmirror.conformance.explorer.core_insides import small_outputs_recycled
from slotmirror.conformance.explorer.engine_actor import EngineActor
from slotmirror.conformance.explorer.faults import NoFaults
from slotmirror.conformance.explorer.inbox import Inbox
from slotmirror.conformance.explorer.output_reader import OutputReader
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.soak.samples import (
    SAMPLES_MIN,
    Flatness,
    Sample,
    count_objects,
    take_sample,
)
from slotmirror.conformance.soak.stage import SoakDevice
from slotmirror.conformance.traces.generate import Rounds, TraceOptions
from slotmirror.conformance.traces.shared_model import SharedModel
from slotmirror.conformance.traces.trace import Trace, TraceStep
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.runtime import ThreadRuntime

ROUNDS_PER_CACHE = 30
STEPS_PER_ROUND = 60
BUILDERS = 3

_SWITCH_S = 1e-4
_QUIESCE_S = 60.0
_HOLDS_MAX = 3


@dataclass(slots=True)
class SoakReport:
    """What a soak has seen."""

    seed: int
    backend: str
    caches: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    """One for each round."""
    objects_left: list[int] = field(default_factory=list)
    """Python's objects after the end of each cache."""
    flatness: Flatness | None = None
    failure: str = ""

    @property
    def rounds(self) -> int:
        """Rounds that were played."""
        return len(self.samples)

    def faults(self) -> list[str]:
        """What makes the soak fail; a soak too short to be judged is right or wrong only."""
        wrong = [self.failure] if self.failure else []
        return wrong + (self.flatness.faults() if self.flatness is not None else [])


def soak(
    backend: DeviceBackend,
    seed: int,
    *,
    seconds: float,
    rounds_max: int | None = None,
    builders: int = BUILDERS,
    progress: Callable[[SoakReport], None] = lambda _: None,
) -> SoakReport:
    """Soak for so many seconds, or `rounds_max` rounds; stops at the first wrong row."""
    report = SoakReport(seed, backend.name)
    device = SoakDevice(backend)
    started = time.monotonic()
    with _soaking():
        for number in itertools.count(seed):
            left = None if rounds_max is None else rounds_max - report.rounds
            cache_rounds = ROUNDS_PER_CACHE if left is None else min(left, ROUNDS_PER_CACHE)
            try:
                one = _OneCache(device, number, builders, report, started)
                one.serve(cache_rounds, until=started + seconds)
                del one
            except Exception as error:
                report.failure = f"cache {number}: {type(error).__name__}: {error}"
            report.objects_left.append(count_objects(report.rounds))
            report.seconds = time.monotonic() - started
            done = rounds_max is not None and report.rounds >= rounds_max
            if report.failure or done or report.seconds >= seconds:
                break
            progress(report)
    if len(report.samples) >= SAMPLES_MIN:
        report.flatness = Flatness.of(report.samples, report.objects_left)
    return report


@contextmanager
def _soaking() -> Iterator[None]:
    """Threads that are switched often, recycled outputs, no log lines."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    try:
        with quiet_core(), small_outputs_recycled():
            yield
    finally:
        sys.setswitchinterval(interval_s)


class _OneCache:
    """A cache of its own settings, drawn from a seed, and its rounds."""

    def __init__(
        self, device: SoakDevice, seed: int, builders: int, report: SoakReport, started: float
    ) -> None:
        self._device = device
        self._rng = random.Random(seed)
        self._rounds = Rounds(seed, TraceOptions(steps=STEPS_PER_ROUND))
        self._builders = builders
        self._report = report
        self._started = started
        self._copies = device.backend.capabilities.device_copies

    def serve(self, rounds: int, until: float) -> None:
        """Play so many rounds, or until the clock says so; raises at what is wrong."""
        report, cache = self._report, self._new_cache()
        try:
            for _ in range(rounds):
                self._play(cache, *self._rounds.draw())
                elapsed_s = time.monotonic() - self._started
                report.samples.append(
                    take_sample(cache, len(report.samples), report.caches, elapsed_s)
                )
                if time.monotonic() >= until:
                    break
        finally:
            self._end(cache)

    def _new_cache(self) -> PrefixCacheManager:
        rng = self._rng
        config: PrefixCacheConfig = replace(
            self._rounds.config,
            committer="threaded",
            mover_threads=rng.choice([1, 1, 2]),
            pin_outputs=rng.random() < 0.3,
        )
        cache = PrefixCacheManager(config, self._device.backend)
        cache.register_policy(self._rounds.policy)
        self._report.caches += 1
        return cache

    def _end(self, cache: PrefixCacheManager) -> None:
        stats = cache.stats()
        closed = stats["batches_closed"]
        assert isinstance(closed, dict)
        for reason, count in closed.items():
            self._report.counts[f"batches closed by {reason}"] += count
        cache.shutdown()
        if self._device.violations():
            raise AssertionError(f"the device's rules were broken: {self._device.violations()}")

    def _play(self, cache: PrefixCacheManager, trace: Trace, happens: Counter[str]) -> None:
        """One round: the engine here, the builders on their threads; all rest at its end."""
        runtime = ThreadRuntime()
        model = SharedModel(trace.policy.needs_full_hidden_states)
        inbox = Inbox(runtime, random.Random(self._rng.random()))
        saved: dict[int, TraceStep] = {}
        stage = self._device.stage(trace)
        engine = EngineActor(trace, cache, model, stage, inbox, saved, NoFaults())
        builders = [self._builder(cache, model, inbox, trace, saved) for _ in range(self._builders)]
        failures: list[BaseException] = []

        def run(actor: EngineActor | BuilderActor) -> None:
            try:
                actor.run()
            except BaseException as error:
                failures.append(error)
                inbox.abandon()
                cache.shutdown()  # whoever waits for a page or for rows goes on

        threads = [
            runtime.start_thread(f"builder {i}", partial(run, one))
            for i, one in enumerate(builders)
        ]
        run(engine)
        inbox.close()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        cache.quiesce(_QUIESCE_S)
        for counts in (happens, model.counts, engine.counts, *(one.counts for one in builders)):
            self._report.counts += counts

    def _builder(
        self,
        cache: PrefixCacheManager,
        model: SharedModel,
        inbox: Inbox,
        trace: Trace,
        saved: dict[int, TraceStep],
    ) -> BuilderActor:
        judge = NoFaults()
        return BuilderActor(
            cache,
            model,
            inbox,
            trace.rows,
            saved,
            random.Random(self._rng.random()),
            judge,
            OutputReader(judge, self._device.read),
            on_device=0.3 if self._copies else 0.0,
            holds_max=_HOLDS_MAX,
        )
