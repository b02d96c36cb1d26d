"""One explored run: a trace, a schedule, and everything that must hold at its end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from slotmirror.conformance.explorer.builder_actor import BuilderActor
from slotmirror.conformance.explorer.choices import Choices
from slotmirror.conformance.explorer.end_checks import check_idle, check_released, settle
from slotmirror.conformance.explorer.engine_actor import EngineActor
from slotmirror.conformance.explorer.faults import (
    ActorInterrupted,
    ActorKilled,
    FaultJudge,
    FaultPlanned,
)
from slotmirror.conformance.explorer.inbox import Inbox
from slotmirror.conformance.explorer.log_watch import LogWatch
from slotmirror.conformance.explorer.output_reader import OutputReader
from slotmirror.conformance.explorer.runtime import ExploredPacing, ExploredRuntime
from slotmirror.conformance.explorer.scheduler import Scheduler, Step
from slotmirror.conformance.explorer.stage import Stage
from slotmirror.conformance.simulated import PROFILES, Profile, SimulatedBackend
from slotmirror.conformance.simulated.streams import SimulatedStream
from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.trace import Trace, TraceStep
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.runtime import Thread


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What surrounds the trace.

    builders        threads that consume steps
    profile         kind of device
    device_outputs  how often a builder wants its rows on the device, of 1
    early_shutdown  the engine shuts down while builders are at work
    fault           what goes wrong
    """

    builders: int = 1
    profile: Profile = PROFILES["plain"]
    device_outputs: float = 0.0
    early_shutdown: bool = False
    fault: FaultPlanned | None = None


@dataclass(slots=True)
class RunResult:
    """What one run did."""

    counts: Counter[str] = field(default_factory=Counter)
    log_order: int = 0
    points: int = 0
    switches: int = 0


class RunFailure(AssertionError):
    """A run that showed a defect; the message has the log's tail."""


class ExploredRun:
    """Builds the actors of one run and plays it. Use once."""

    def __init__(self, trace: Trace, choices: Choices, seed: int, options: RunOptions) -> None:
        self._trace = trace
        self._options = options
        self._rng = random.Random(seed)
        self._scheduler = Scheduler(choices)
        self._runtime = ExploredRuntime(self._scheduler)
        self._model = PlainModel(trace.policy.needs_full_hidden_states)
        self._saved_steps: dict[int, TraceStep] = {}
        self._watch: LogWatch | None = None
        self._shutdown_s = 0.0
        self.result = RunResult()

    def play(self) -> RunResult:
        """Run to the end; raises `RunFailure`."""
        self._scheduler.spawn("engine", self._engine)
        try:
            self._scheduler.run()
        except BaseException as error:
            tail = self._watch.tail if self._watch is not None else ()
            lines = "\n".join(f"  {line}" for line in tail)
            raise RunFailure(
                f"{self._trace.name}: {type(error).__name__}: {error}\nlog tail:\n{lines}"
            ) from error
        result = self.result
        result.points, result.switches = self._scheduler.points, self._scheduler.switches
        result.log_order = self._watch.order if self._watch is not None else 0
        result.counts += self._model.counts
        return result

    # -- on the engine's actor ----------------------------------------------------------------

    def _engine(self) -> None:
        pacing = ExploredPacing(self._scheduler)
        backend = SimulatedBackend(profile=self._options.profile, pacing=pacing)
        self._scheduler.deaths = (ActorKilled, ActorInterrupted)
        judge = FaultJudge(self._options.fault, backend, self._scheduler)
        pacing.before_call = judge.before_call
        self._scheduler.steps = backend.steppable
        self._scheduler.step = lambda step: backend.step(_stream(step))
        cache = PrefixCacheManager(self._trace.config, backend, self._runtime)
        self._watch = LogWatch(cache)
        cache.register_policy(self._trace.policy)
        self._serve(cache, backend, judge)
        gave_up = self._shutdown_s >= self._trace.config.device_wait_timeout_s
        check_released(cache, backend, self._options.fault, gave_up=gave_up)
        if judge.planned is not None and judge.happened:
            self.result.counts[f"fault {judge.planned.name}"] += 1

    def _serve(
        self, cache: PrefixCacheManager, backend: SimulatedBackend, judge: FaultJudge
    ) -> None:
        """Play the trace with its builders, and shut down."""
        inbox = Inbox(self._runtime, self._rng)
        stage = Stage(backend, self._trace)
        engine = EngineActor(
            self._trace, cache, self._model, stage, inbox, self._saved_steps, judge
        )
        builders: list[BuilderActor] = []
        threads: list[Thread] = []

        def add_builder() -> None:
            builder = BuilderActor(
                cache,
                self._model,
                inbox,
                self._trace.rows,
                self._saved_steps,
                self._rng,
                judge,
                OutputReader(judge, backend.bytes_on_device),
                on_device=self._options.device_outputs,
            )
            builders.append(builder)
            name = f"builder {len(builders)}"
            threads.append(self._runtime.start_thread(name, builder.run))

        judge.replace_builder = add_builder
        for _ in range(self._options.builders):
            add_builder()
        engine.run()
        inbox.close()
        if not self._options.early_shutdown:
            for thread in threads:
                thread.join()
            settle(cache, judge)
            judge.check_sticky(cache)
            if not judge.happened:
                check_idle(cache, self._trace)
                self._count_batches(cache)
        began_s = self._scheduler.now_s
        cache.shutdown()
        self._shutdown_s = self._scheduler.now_s - began_s
        for thread in threads:
            thread.join()
        for counts in (engine.counts, *(builder.counts for builder in builders)):
            self.result.counts += counts

    def _count_batches(self, cache: PrefixCacheManager) -> None:
        stats = cache.stats()
        closed = stats["batches_closed"]
        assert isinstance(closed, dict)
        for reason, count in closed.items():
            self.result.counts[f"batches closed by {reason}"] += count
        for name in ("deferred_rows_dead", "rows_captured_directly"):
            count = stats[name]
            assert isinstance(count, int)
            self.result.counts[name.replace("_", " ")] += count


def _stream(step: Step) -> SimulatedStream:
    assert isinstance(step, SimulatedStream)
    return step
