"""Recording: draw traces, play them on inline `cpu_ref`, prove each delivery, keep its hash."""

from __future__ import annotations

import random
from pathlib import Path

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.golden.player import (
    Mode,
    Player,
    config_of,
    delivered_sha256,
    policy_json,
)
from slotmirror.conformance.golden.recording import (
    RecordedStep,
    Recording,
    Take,
    recorded_step,
    write_recordings,
)
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.traces.delivery_check import DeliveryCheck
from slotmirror.conformance.traces.generate import TraceOptions, draw_trace
from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.scenarios import scenarios
from slotmirror.conformance.traces.trace import Trace, TraceStep

TRACES = 42
STEPS = 25
FIRST_SEED = 1
_DISCARDS = 0.05
_PICKS = 0.1


def record_traces(path: Path, traces: int = TRACES) -> list[Recording]:
    """Record the traces written by hand, and so many drawn ones, into a file.

    Raises `WrongDelivery` if the reference is wrong; then nothing is written.
    """
    options = TraceOptions(steps=STEPS, refused_key=0.0)
    seeds = range(FIRST_SEED, FIRST_SEED + traces)
    drawn = [draw_trace(seed, options)[0] for seed in seeds]
    with quiet_core():
        recordings = [
            record_trace(trace, seed)
            for seed, trace in enumerate((*scenarios().values(), *drawn), start=FIRST_SEED)
        ]
    write_recordings(path, recordings)
    return recordings


def record_trace(trace: Trace, seed: int) -> Recording:
    """One trace, played and proven; `seed` says when its steps are consumed."""
    recorder = _Recorder(trace, random.Random(seed))
    try:
        recorded = tuple(recorder.step(n, step) for n, step in enumerate(trace.steps, start=1))
        last = recorder.takes(leave=0)
        recorder.player.finish()
    finally:
        recorder.player.close()
    return Recording(trace.name, config_of(trace.config), policy_json(trace.policy), recorded, last)


class _Recorder:
    """Engine, consumer and judge of one recording."""

    def __init__(self, trace: Trace, rng: random.Random) -> None:
        self._trace = trace
        self._rng = rng
        self._model = PlainModel(trace.policy.needs_full_hidden_states)
        self._steps: dict[int, TraceStep] = {}
        self.player = Player(
            Workbench(CpuRefBackend()),
            trace.rows,
            config_of(trace.config),
            policy_json(trace.policy),
            Mode("inline"),
        )

    def step(self, number: int, step: TraceStep) -> RecordedStep:
        """Play one step with the takes that come before its save."""
        told = recorded_step(number, step, ())
        if step.reset == "before":
            self._model.reset()
        self.player.start(told)
        self._model.start(step, self._model.mark())
        if step.reset == "during":
            self._model.reset()
        depth = self._trace.config.staging_depth
        takes = self.takes(leave=self._rng.randrange(depth) if step.saved else depth)
        if step.saved:
            self.player.save(told)
            self._model.save(number, step)
            self._steps[number] = step
        return recorded_step(number, step, takes)

    def takes(self, leave: int) -> tuple[Take, ...]:
        """Consume steps in any legal order until so many are left."""
        takes = []
        while len(self._model.unconsumed) > leave:
            legal = [s for s in self._model.unconsumed if not self._model.must_wait_for(s)]
            takes.append(self._take(self._rng.choice(legal)))
        return tuple(takes)

    def _take(self, number: int) -> Take:
        if self._rng.random() < _DISCARDS:
            self._model.begin(number, ())
            self.player.discard(number)
            self._model.consumed(number)
            return Take(number, (), "")
        names = tuple(
            name
            for name in self._model.unconsumed[number].parts
            if not self._model.must_miss(number, name)
        )
        if self._rng.random() < _PICKS:
            names = tuple(name for name in names if self._rng.random() < 0.5)
        self._model.begin(number, names)
        out = self.player.take(number, names)
        check = DeliveryCheck(self._model, self._trace.rows, self._steps[number])
        check.check(number, names, out)
        self._model.consumed(number)
        return Take(number, names, delivered_sha256(out, names))
