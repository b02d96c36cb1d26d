"""Every schedule of a small trace that differs from the default in a few places.

The default schedule lets everybody run as far as it can. A deviation lets another go on at one
point; most races need one or two of them. All schedules with at most `deviations_max` are played,
each exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slotmirror.conformance.explorer.choices import BoundedChoices
from slotmirror.conformance.explorer.run import ExploredRun, RunFailure, RunOptions
from slotmirror.conformance.explorer.search import quiet_runs
from slotmirror.conformance.traces.trace import Trace

Deviations = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class ExhaustiveReport:
    """What an exhaustive search has seen; `failed` are the deviations of the first failure."""

    trace: str
    deviations_max: int
    schedules: int = 0
    log_orders: int = 0
    complete: bool = False
    failed: Deviations | None = None
    failure: str = ""


def explore_all(
    trace: Trace,
    deviations_max: int,
    options: RunOptions | None = None,
    schedules_max: int = 1_000_000,
) -> ExhaustiveReport:
    """Play them all, or the first `schedules_max`; stops at the first failure."""
    report = ExhaustiveReport(trace.name, deviations_max)
    orders = set()
    waiting: list[Deviations] = [()]
    with quiet_runs():
        while waiting and report.schedules < schedules_max:
            deviations = waiting.pop()
            choices = BoundedChoices(dict(deviations))
            report.schedules += 1
            try:
                # The builders' own dice are the same in every schedule.
                result = ExploredRun(trace, choices, 0, options or RunOptions()).play()
            except RunFailure as failure:
                report.failed, report.failure = deviations, str(failure)
                return report
            orders.add(result.log_order)
            report.log_orders = len(orders)
            if len(deviations) < deviations_max:
                waiting.extend(_further(deviations, choices.widths))
    report.complete = not waiting
    return report


def _further(deviations: Deviations, widths: list[int]) -> Iterator[Deviations]:
    """The same deviations and one more behind them, in every way."""
    start = deviations[-1][0] + 1 if deviations else 0
    for point in range(start, len(widths)):
        for other in range(1, widths[point]):
            yield (*deviations, (point, other))
