"""The bars, beside what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tables import markdown_table

Figures = Mapping[str, Any]
"""Name of a benchmark → its JSON."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le}


@dataclass(frozen=True)
class Bar:
    """One line: `value` must be `relation` `limit`; `note` has other readings of the same run."""

    measure: str
    relation: str
    limit: float
    value: float
    form: str
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the bar was reached."""
        return _COMPARE[self.relation](self.value, self.limit)


def bars(figures: Figures) -> list[Bar]:
    """Every bar whose benchmark was run."""
    by_benchmark: dict[str, Callable[[Any], Iterator[Bar]]] = {
        "against_vllm_omni": _peer_bars,
        "step_cost": _growth_bars,
        "against_memcpy": _copy_bars,
        "long_run": _long_run_bars,
        "replay_cost": _replay_bars,
    }
    return [
        bar
        for name, bars_of in by_benchmark.items()
        if name in figures
        for bar in bars_of(figures[name])
    ]


def markdown(found: list[Bar]) -> str:
    """The table."""
    return markdown_table(
        ("measure", "bar", "measured", "", "beside it"),
        [
            (
                bar.measure,
                f"{bar.relation} {bar.form.format(bar.limit)}",
                bar.form.format(bar.value),
                "met" if bar.met else "**missed**",
                bar.note,
            )
            for bar in found
        ],
    )


def _peer_bars(figures: Any) -> Iterator[Bar]:
    cases = {result["case"]: result for result in figures["results"]}

    def ratio(case: str, what: str) -> float:
        return float(cases[case][f"peer_{what}_us"] / cases[case][f"ours_{what}_us"])

    def note(case: str) -> str:
        in_cpu, low = ratio(case, "engine_cpu"), ratio(case, "engine_low")
        return f"in CPU time of the thread {in_cpu:.0f}, lower deciles {low:.0f}"

    small, large = "decode, 16 requests, 1 key(s)", "decode, 256 requests, 1 key(s)"
    name = "decode step, {} requests, {}: peer ÷ ours"
    engine, every = "engine thread", "CPU of all threads"
    yield Bar(name.format(256, engine), "≥", 150, ratio(large, "engine"), "{:.0f}", note(large))
    yield Bar(name.format(256, every), "≥", 60, ratio(large, "cpu"), "{:.0f}")
    yield Bar(name.format(16, engine), "≥", 25, ratio(small, "engine"), "{:.0f}", note(small))


def _growth_bars(figures: Any) -> Iterator[Bar]:
    rows = {(g["row_bytes"], g["requests"]): g["ratio"] for g in figures["growth"]}
    for requests, limit in ((256, 1.3), (1024, 1.6)):
        if (32, requests) in rows:
            value = rows[32, requests]
            full = f"rows of 4 KiB: {rows[4096, requests]:.2f}×"
            measure = f"growth 16 → {requests:,} requests, rows of 32 bytes"
            yield Bar(measure, "≤", limit, value, "{:.2f}×", full)


def _copy_bars(figures: Any) -> Iterator[Bar]:
    rows = {
        (c["name"], c["rows"], c["destinations"], c["copies"]): c["ratio"]
        for c in figures["comparisons"]
    }

    def worst(name: str, measure: str, limit: float, copies: int) -> Bar:
        reused, fresh = (rows[name, 8192, where, copies] for where in ("reused", "fresh"))
        note = f"reused {reused:.2f}×, fresh {fresh:.2f}×"
        if copies > 1:
            over_one = (rows[name, 8192, where, 1] for where in ("reused", "fresh"))
            note += "; over a single copy {:.2f}×, {:.2f}×".format(*over_one)
        return Bar(measure, "≤", limit, max(reused, fresh), "{:.2f}×", note)

    yield worst("prefill", "prefill of 8,192 rows over three plain copies", 1.5, 3)
    yield worst("hit", "hit of 8,192 rows over one plain copy", 1.3, 1)
    for count, limit in ((256, 2.0), (8192, 1.3)):
        value = rows["scatter", count, "reused", 1]
        yield Bar(f"scatter of {count:,} rows over plain copy", "≤", limit, value, "{:.2f}×")


def _long_run_bars(figures: Any) -> Iterator[Bar]:
    waits = (
        f"waits for a page {figures['page_waits']}, for budget {figures['budget_waits']}, "
        f"for a lock {figures['lock_waits']}, the longest {figures['lock_wait_us_max']:.0f} µs"
    )
    blocked = figures["blocked_otherwise"]
    yield Bar("engine thread blocked, mixed workload", "≤", 0, blocked, "{:.0f} steps", waits)
    steps = f"host memory beyond pool and staging, growth over {figures['steps']:,} steps"
    growth_mib = figures["growth_bytes"] / 2**20
    objects = f"{figures['growth_objects']:+,} Python objects"
    yield Bar(steps, "≤", 2, growth_mib, "{:.2f} MiB", objects)


def _replay_bars(figures: Any) -> Iterator[Bar]:
    note = (
        f"CPU of all threads {figures['cost_cpu']:+.1%}; "
        f"engine thread in the cache's calls {figures['calls_wall']:.1%}"
    )
    yield Bar("cost of the cache in a replay", "≤", 0.03, figures["cost_wall"], "{:.1%}", note)
