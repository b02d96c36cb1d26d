"""Traces drawn from a seed: settings, an engine's steps, and what the stage computes in each."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.rows import (
    HOST_KEY,
    LEFTOVER_KEY,
    OPTIONAL_KEYS,
    SPECS,
    RowTable,
)
from slotmirror.conformance.traces.toy_engine import ToyEngine, ToySettings
from slotmirror.conformance.traces.trace import PADDING_MAX, Part, Trace, TraceStep
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import StepEvents
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.policy import ModelCachePolicy

_CAPACITY_TOKENS = 64


class TraceError(AssertionError):
    """The toy engine itself served a wrong prefix: the trace proves nothing."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What kind of traces are drawn. Probabilities are per step.

    ends   a last step without tokens ends every request, so that another trace may follow
    """

    steps: int = 10
    ends: bool = False
    failed_forward: float = 0.05
    refused_key: float = 0.05
    leftover: float = 0.15
    reset: float = 0.02


def draw_trace(seed: int, options: TraceOptions = TraceOptions()) -> tuple[Trace, Counter[str]]:
    """The trace of this seed, and what happens in it."""
    rng = random.Random(seed)
    settings = _draw_settings(rng)
    policy = _draw_policy(rng)
    engine = ToyEngine(rng, settings)
    steps = _draw_steps(rng, options, policy, engine)
    config = _draw_config(rng, settings)
    return _proven(f"seed {seed}", config, policy, steps, engine), engine.counts


class Rounds:
    """Traces for one and the same cache, one after the other, as many as are asked for.

    All have the settings and the policy of the seed; each ends every request that it began.
    """

    def __init__(self, seed: int, options: TraceOptions = TraceOptions()) -> None:
        self._name = f"seed {seed}"
        self._options = replace(options, ends=True)
        self._rng = random.Random(seed)
        self._settings = _draw_settings(self._rng)
        self.policy = _draw_policy(self._rng)
        self.config = _draw_config(self._rng, self._settings)
        self._drawn = 0

    def draw(self) -> tuple[Trace, Counter[str]]:
        """The next trace, and what happens in it."""
        self._drawn += 1
        engine = ToyEngine(self._rng, self._settings)
        steps = _draw_steps(self._rng, self._options, self.policy, engine)
        name = f"{self._name}, round {self._drawn}"
        return _proven(name, self.config, self.policy, steps, engine), engine.counts


def _draw_steps(
    rng: random.Random, options: TraceOptions, policy: ModelCachePolicy, engine: ToyEngine
) -> list[TraceStep]:
    drawer = _StepDrawer(rng, options, policy)
    steps = []
    for number in range(options.steps):
        reset = drawer.reset()
        if reset == "before":
            engine.reset()
        steps.append(drawer.step(*engine.step(last=number == options.steps - 1), reset))
        if reset == "during":
            engine.reset()
    if options.ends:
        steps.append(TraceStep(engine.end(), saved=False))
    return steps


def _proven(
    name: str,
    config: PrefixCacheConfig,
    policy: ModelCachePolicy,
    steps: list[TraceStep],
    engine: ToyEngine,
) -> Trace:
    rows = RowTable(len(engine.prefix_of_stamp) - 1)
    trace = Trace(name, config, policy, tuple(steps), rows)
    _prove_prefixes(trace, engine)
    return trace


def _draw_settings(rng: random.Random) -> ToySettings:
    block_size = rng.choice([1, 2, 4])
    return ToySettings(
        num_blocks=rng.randrange(2, 8) * 4 // block_size,
        block_size=block_size,
        prefix_tokens_max=10,
        tail_tokens_max=6,
        running_max=4,
        draft=rng.choice([0.0, 0.0, 0.0, 0.5]),
    )


def _draw_policy(rng: random.Random) -> ModelCachePolicy:
    return ModelCachePolicy(
        needs_full_hidden_states=rng.random() < 0.8,
        deferred_keys=frozenset(key for key in OPTIONAL_KEYS if rng.random() < 0.5),
        leftover_keys=frozenset({LEFTOVER_KEY}),
    )


def _draw_config(rng: random.Random, settings: ToySettings) -> PrefixCacheConfig:
    pinned = rng.random() < 0.3
    return PrefixCacheConfig(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        staging_depth=rng.choice([1, 2, 4, 6]),
        staging_capacity_tokens=_CAPACITY_TOKENS,
        device_staging_bytes_max=rng.choice([64, 600, 100_000]),
        copy_chunk_bytes=rng.choice([24, 100, 4096]),
        pin_pool=pinned,
        direct_capture_rows_min=rng.choice([None, 1, 2]) if pinned else None,
        prefetch=rng.random() < 0.7,
        committer="inline" if rng.random() < 0.2 else "threaded",
    )


class _StepDrawer:
    """Draws what the stage does with the engine's steps."""

    def __init__(self, rng: random.Random, options: TraceOptions, policy: ModelCachePolicy) -> None:
        self._rng = rng
        self._options = options
        self._policy = policy
        self._opened: set[str] = set()

    def reset(self) -> str:
        """Whether and when the engine resets its cache around the next step."""
        if self._rng.random() >= self._options.reset:
            return ""
        return self._rng.choice(["before", "during"])

    def step(self, events: StepEvents, parts: tuple[Part, ...], reset: str) -> TraceStep:
        """The whole step."""
        rng, options = self._rng, self._options
        keys = [key for key in OPTIONAL_KEYS if rng.random() < 0.6]
        if self._policy.needs_full_hidden_states:
            keys.insert(0, HIDDEN_KEY)
        order = [part.req_id for part in parts]
        if rng.random() < 0.4:
            rng.shuffle(order)
        failed = rng.random() < options.failed_forward
        refusable = [
            key for key in keys if key in self._opened and key not in (HIDDEN_KEY, HOST_KEY)
        ]
        refuses = refusable and rng.random() < options.refused_key
        step = TraceStep(
            events=events,
            parts=parts,
            saved=bool(parts) and not failed,
            keys=tuple(keys),
            order=tuple(order),
            padding=rng.randrange(PADDING_MAX + 1),
            padded=frozenset(k for k in SPECS if k != HOST_KEY and rng.random() < 0.5),
            refused=rng.choice(refusable) if refuses else None,
            leftover=rng.random() < options.leftover,
            reset=reset,
        )
        if step.saved:
            self._opened.update(keys)
        return step


def _prove_prefixes(trace: Trace, engine: ToyEngine) -> None:
    """Every hit of the trace reads rows of its own prompt, as the dictionaries have them.

    Raises `TraceError` otherwise. Stamps name writes; this ties them to tokens and positions.
    """
    model = PlainModel(needs_hidden=False)
    for number, step in enumerate(trace.steps, start=1):
        if step.reset == "before":
            model.reset()
        model.start(step, model.mark())
        if step.reset == "during":
            model.reset()
        if not step.saved:
            continue
        model.save(number, step)
        for entry in model.unconsumed[number].parts.values():
            own = engine.prefixes_of_owner[entry.part.owner]
            for rows in entry.hit_rows.values():
                for position, stamp in rows.items():
                    if engine.prefix_of_stamp[stamp] != (position, own[position]):
                        raise TraceError(
                            f"{trace.name}: a hit of {entry.part.req_id} at {position}"
                        )
        model.begin(number, ())
        model.consumed(number)
