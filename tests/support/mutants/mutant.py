"""What a mutant is, and the two trials that it has to stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.explorer.search import explore
from slotmirror.conformance.golden.player import Mode, Player, config_of, policy_json
from slotmirror.conformance.golden.recording import recorded_step
from slotmirror.conformance.traces.delivery_check import DeliveryCheck
from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.scenarios import Runs, Says, written

FIRST_SEED = 90_000
SEEDS_MAX = 3000

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A historical bug by its number in the list of them, and the patch that puts it back."""

    bug: int
    name: str
    patch: Patch
    faults: bool = False
    """Whether it shows only when something else fails."""


@dataclass(frozen=True, slots=True)
class Catch:
    """How the explorer caught a mutant: after so many seeds, by bytes or by an invariant."""

    seeds: int
    by: str
    report: str


def hunt(mutant: Mutant) -> Catch | None:
    """Explore with the mutant until it is caught; None if it never is."""
    with pytest.MonkeyPatch.context() as patches:
        mutant.patch(patches)
        report = explore(FIRST_SEED, SEEDS_MAX, faults=mutant.faults)
    if report.failed_seed is None:
        return None
    found = re.match(r"[^:]*: (\w+): (.*)", report.failure)
    kind = found.group(1) if found else report.failure
    by = {"WrongDelivery": "bytes", "ScheduleError": "invariant"}.get(kind, f"exception {kind}")
    return Catch(report.schedules + 1, by, found.group(2) if found else "")


def play_quietly(mutant: Mutant) -> int:
    """Rows that the quiet trace delivers with the mutant; all are right.

    Misses, a hit, a recycled block, deferred rows that are written when their request ends; each
    step is consumed, and the mover idle, before the next one starts.
    """
    trace = written(
        "quiet",
        [
            Says((Runs("a", 0, 4, (0, 1)),)),
            Says((), ended=("a",)),
            Says((Runs("b", 4, 2, (0, 1, 3)),)),
            Says((), ended=("b",)),
            Says((Runs("c", 0, 3, (0, 2)),)),
            Says((), ended=("c",)),
            Says((Runs("d", 2, 2, (0, 3)),)),
        ],
    )
    model = PlainModel(needs_hidden=True)
    with pytest.MonkeyPatch.context() as patches:
        mutant.patch(patches)
        player = Player(
            Workbench(CpuRefBackend()),
            trace.rows,
            config_of(trace.config),
            policy_json(trace.policy),
            Mode("inline"),
        )
        for number, step in enumerate(trace.steps, start=1):
            told = recorded_step(number, step, ())
            player.start(told)
            model.start(step, model.mark())
            if not step.parts:
                continue
            player.save(told)
            model.save(number, step)
            model.begin(number, step.order)
            out = player.take(number, step.order)
            DeliveryCheck(model, trace.rows, step).check(number, step.order, out)
            model.consumed(number)
        player.finish()
    return model.counts["rows"]
