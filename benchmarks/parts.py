"""Which function belongs to which part of a step, and how long each part takes.

`PARTS` is the only place that knows the core by name; a name that no longer resolves is an error
that says so. Parts are timed exclusively: what a timed call spends in another timed call counts
for that one alone. The cost of the timing itself is measured and subtracted.
"""

from __future__ import annotations

import functools
import pkgutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_CORE = "slotmirror.core."

PARTS: dict[str, tuple[str, ...]] = {
    # The calls of the cache; what stays with them is checks, locks and bookkeeping.
    "new_step_starts": (f"{_CORE}manager:PrefixCacheManager.new_step_starts",),
    "save_outputs": (f"{_CORE}manager:PrefixCacheManager.save_outputs",),
    "materialize": (f"{_CORE}manager:PrefixCacheManager.materialize",),
    # The engine thread.
    "check events": (f"{_CORE}manager:check_shape", f"{_CORE}manager:check_slots"),
    "requests, hits": (
        f"{_CORE}hit_registry:HitRegistry.plan",
        f"{_CORE}hit_registry:HitRegistry.apply",
        f"{_CORE}hit_registry:HitRegistry.note_saved",
        f"{_CORE}data_plane:DataPlane.gathers_of",
    ),
    "slots, claim": (
        f"{_CORE}slot_table:SlotTable.plan_hits",
        f"{_CORE}slot_table:SlotTable.claim",
        f"{_CORE}slot_table:SlotTable.mark_written",
    ),
    "split": (f"{_CORE}saving:split_outputs", f"{_CORE}open_keys:OpenKeys.of"),
    "snapshot": ("{backend}.snapshot",),
    "claim page, stage": (f"{_CORE}staging:StagingRing.stage",),
    "launch copy": ("{backend}.copy_to_host",),
    "make write": (f"{_CORE}data_plane:DataPlane.write_of",),
    "append to log": (f"{_CORE}oplog:OpLog.append",),
    # The builder's thread and the mover's.
    "row layout": (f"{_CORE}hits:Hits.row_of_position_0",),
    "merge": (f"{_CORE}manager:merge_outputs",),
    "operation": (f"{_CORE}committer:Committer._carry_out",),
    "scatter": ("{backend}.scatter_slots",),
    "gather": ("{backend}.gather_slots",),
}

_CALIBRATION_CALLS = 500
_CALIBRATION_RUNS = 20


@dataclass(frozen=True, slots=True)
class Span:
    """One timed call; seconds of the performance counter."""

    thread: int
    part: str
    start_s: float
    end_s: float
    children_s: float
    num_children: int
    depth: int


@dataclass(frozen=True, slots=True)
class TimingCost:
    """What timing one call adds: to the call's own time, and to its caller's."""

    inside_s: float
    outside_s: float


class Instruments:
    """Times `parts` while it is entered; `spans` has every call, in the order of their ends."""

    def __init__(self, backend_class: type, parts: dict[str, tuple[str, ...]] = PARTS) -> None:
        self.spans: list[Span] = []
        self._local = threading.local()
        backend = f"{backend_class.__module__}:{backend_class.__qualname__}"
        self._targets = [
            (part, *resolve(name.format(backend=backend)))
            for part, names in parts.items()
            for name in names
        ]
        self._undo: list[Callable[[], None]] = []
        self.cost = self._measure_own_cost()

    def __enter__(self) -> Self:
        for part, owner, name in self._targets:
            self._replace(part, owner, name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._undo:
            self._undo.pop()()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as `part`."""
        local, spans, clock, ident = self._local, self.spans, time.perf_counter, threading.get_ident

        @functools.wraps(function)
        def call(*args: Any, **settings: Any) -> Any:
            outer = getattr(local, "frame", None)
            frame = local.frame = [0.0, 0, 0 if outer is None else outer[2] + 1]
            start = clock()
            try:
                return function(*args, **settings)
            finally:
                end = clock()
                local.frame = outer
                if outer is not None:
                    outer[0] += end - start
                    outer[1] += 1
                spans.append(Span(ident(), part, start, end, *frame))

        return call

    def own_us(self, spans: Sequence[Span]) -> dict[tuple[int, str], float]:
        """(thread, part) → exclusive microseconds in these spans, the timing's cost subtracted."""
        own: dict[tuple[int, str], float] = defaultdict(float)
        for span in spans:
            seconds = span.end_s - span.start_s - span.children_s - self.cost.inside_s
            own[span.thread, span.part] += seconds - span.num_children * self.cost.outside_s
        return {key: max(seconds, 0.0) * 1e6 for key, seconds in own.items()}

    def _replace(self, part: str, owner: Any, name: str) -> None:
        inherited = name not in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, self.timed(part, original))
        self._undo.append(
            functools.partial(delattr, owner, name)
            if inherited
            else functools.partial(setattr, owner, name, original)
        )

    def _measure_own_cost(self) -> TimingCost:
        """Time calls that do nothing, within a call that does nothing else; the quietest run."""
        inner = self.timed("inner", lambda: None)
        outer = self.timed("outer", lambda: [inner() for _ in range(_CALIBRATION_CALLS)])
        inside_s, outside_s = [], []
        for _ in range(_CALIBRATION_RUNS):
            outer()
            nested = self.spans[-1]
            around_s = nested.end_s - nested.start_s - nested.children_s
            inside_s.append(nested.children_s / nested.num_children)
            outside_s.append(around_s / nested.num_children)
            self.spans.clear()
        return TimingCost(min(inside_s), min(outside_s))


def resolve(dotted: str) -> tuple[Any, str]:
    """The object that has the function, and the function's name in it.

    Raises `SystemExit` with the name that is gone.
    """
    owner, _, name = dotted.rpartition("." if "." in dotted.partition(":")[2] else ":")
    try:
        found = pkgutil.resolve_name(owner)
        getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"benchmarks/parts.py names {dotted!r}, which is gone ({error}): change its table"
        ) from None
    return found, name
