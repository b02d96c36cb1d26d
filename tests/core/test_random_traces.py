"""Random engines, movers as late as they may be, builders in any order: all rows, every time."""

from __future__ import annotations

from collections import Counter

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.explorer.choices import SeededChoices
from slotmirror.conformance.explorer.run import ExploredRun, RunOptions
from slotmirror.conformance.explorer.search import quiet_runs
from slotmirror.conformance.golden.check import MODES, check_traces
from slotmirror.conformance.golden.record import record_trace
from slotmirror.conformance.traces.generate import TraceOptions, draw_trace

LONG = TraceOptions(steps=60, refused_key=0.0)


def test_long_random_traces_match_the_plain_model() -> None:
    """Every delivered row, span and refusal equals the dictionaries'; all that can happen did."""
    counts: Counter[str] = Counter()
    with quiet_runs():
        for seed in range(40):
            trace, happens = draw_trace(seed, LONG)
            run = ExploredRun(trace, SeededChoices(seed), seed, RunOptions(builders=2))
            counts += run.play().counts + happens
    at_least = {
        "rows": 15_000,
        "hits": 500,
        "recycled blocks": 1000,
        "preemptions": 300,
        "same-step hit rows": 80,
        "discards": 60,
        "hits without rows": 30,
        "replays asked for too early": 10,
        "batches closed by ended": 150,
        "batches closed by preempted": 50,
        "batches closed by hit": 10,
        "batches closed by budget": 80,
        "deferred rows dead": 10,
    }
    assert {event: counts[event] for event in at_least if counts[event] < at_least[event]} == {}


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_H5_prefetch_on_or_off_inline_or_threaded_identical_bytes(seed: int) -> None:
    """The same steps under four configurations deliver the same bytes."""
    recording = record_trace(draw_trace(seed, LONG)[0], seed)
    report = check_traces([recording], "cpu_ref", CpuRefBackend)
    assert report.differences == []
    assert report.takes > 10 * len(MODES)
