"""Random engines, movers as late as they may be, builders in any order: all rows, every time."""

from __future__ import annotations

from collections import Counter

import pytest

from support.random_trace import RandomTrace

SEEDS_PER_TEST = 150
STEPS = 40


def test_random_traces_match_the_plain_model() -> None:
    """Every delivered row, span and refusal equals the dictionaries'; all that can happen did."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS_PER_TEST):
        counts += RandomTrace(seed).run(STEPS)
    at_least = {
        "rows": 100_000,
        "hits": 4000,
        "recycled blocks": 5000,
        "preemptions": 500,
        "own-step hit tokens": 300,
        "steps without a save": 300,
        "discards": 300,
        "hits without rows": 100,
        "replays asked for too early": 10,
        "batches closed by ended": 100,
        "batches closed by preempted": 100,
        "batches closed by hit": 30,
        "batches closed by budget": 100,
        "deferred rows dead": 2,
    }
    assert {event: counts[event] for event in at_least if counts[event] < at_least[event]} == {}


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_H5_prefetch_on_or_off_inline_or_threaded_identical_bytes(seed: int) -> None:
    """The same steps under four configurations deliver the same bytes."""
    runs = []
    for committer in ("threaded", "inline"):
        for prefetch in (True, False):
            trace = RandomTrace(seed, committer=committer, prefetch=prefetch)
            trace.run(STEPS)
            runs.append(sorted(trace.outputs))
    assert runs[0]
    assert all(run == runs[0] for run in runs[1:])
