"""Short traces written by hand: one danger each, small enough to try every schedule of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.conformance.traces.rows import LEFTOVER_KEY, RowTable
from slotmirror.conformance.traces.trace import Part, Trace, TraceStep
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.policy import ModelCachePolicy

DEFERRED_KEY = "codes.audio"
_BLOCK_SIZE = 2
_NUM_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Runs:
    """A request in a step: it computes `count` tokens from position `first` on.

    `blocks` is its whole table; `how` is "new", "resumed" or "runs" (`new` also resumes, L1).
    A new or resumed request with `first` above 0 hits the blocks before it.
    """

    name: str
    first: int
    count: int
    blocks: tuple[int, ...]
    how: str = "new"


@dataclass(frozen=True, slots=True)
class Says:
    """One step: who runs, who ended or was preempted before, which keys are computed."""

    runs: tuple[Runs, ...]
    ended: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    keys: tuple[str, ...] = (HIDDEN_KEY, DEFERRED_KEY)
    saved: bool = True


class _Writer:
    """Turns sayings into a trace's steps."""

    def __init__(self) -> None:
        self._tables = BlockTables(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        self._owners: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._owners_made = 0
        self.last_stamp = 0

    def step(self, says: Says) -> TraceStep:
        """The next step."""
        for name in says.ended:
            del self._owners[name]
        admitted = {"new": [], "resumed": [], "runs": []}  # type: dict[str, list[AdmittedRequest]]
        appended = {}
        for run in says.runs:
            if run.how == "runs":
                appended[run.name] = run.blocks[self._known[run.name] :]
            admitted[run.how].append(AdmittedRequest(run.name, run.first, run.blocks))
            self._known[run.name] = len(run.blocks)
        events = self._tables.step(
            ended=says.ended,
            preempted=says.preempted,
            new=admitted["new"],
            resumed=admitted["resumed"],
            appended=appended,
            num_scheduled_tokens={run.name: run.count for run in says.runs},
            num_computed_tokens={run.name: run.first for run in says.runs},
        )
        parts = tuple(self._part(run) for run in says.runs)
        order = tuple(run.name for run in says.runs)
        return TraceStep(events=events, parts=parts, saved=says.saved, keys=says.keys, order=order)

    def _part(self, run: Runs) -> Part:
        if run.name not in self._owners:
            self._owners_made += 1
            self._owners[run.name] = self._owners_made
        stamps = self.last_stamp + 1
        self.last_stamp += run.count
        positions = range(run.first, run.first + run.count)
        hits = run.first if run.how != "runs" else 0
        return Part(
            owner=self._owners[run.name],
            req_id=run.name,
            first=run.first,
            slots=tuple(_slot(run, p) for p in positions),
            hit_slots=tuple(_slot(run, p) for p in range(hits)),
            stamps=stamps,
            accepted=run.first + run.count,
        )


def _slot(run: Runs, position: int) -> int:
    return run.blocks[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE


def written(name: str, says: Sequence[Says], **settings: int) -> Trace:
    """The trace of these sayings; `settings` are the cache's."""
    writer = _Writer()
    steps = tuple(writer.step(one) for one in says)
    config = PrefixCacheConfig(
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        staging_depth=settings.get("staging_depth", 2),
        staging_capacity_tokens=8,
        device_staging_bytes_max=settings.get("device_staging_bytes_max", 4096),
        copy_chunk_bytes=32,
    )
    policy = ModelCachePolicy(
        deferred_keys=frozenset({DEFERRED_KEY}), leftover_keys=frozenset({LEFTOVER_KEY})
    )
    return Trace(name, config, policy, steps, RowTable(writer.last_stamp))


def scenarios() -> dict[str, Trace]:
    """All of them, by name."""
    first = Says((Runs("a", 0, 4, (0, 1)),))
    hit = Says((Runs("b", 4, 1, (0, 1, 2)),), ended=("a",))
    traces = (
        written("a block is given away behind a read", [
            first,
            hit,
            Says((Runs("c", 0, 2, (0,)),), ended=("b",)),
        ]),
        written("a hit of the same step, on a recycled block", [
            Says((Runs("x", 0, 2, (1,)),)),
            Says((Runs("a", 0, 2, (1,)), Runs("b", 2, 1, (1, 2))), ended=("x",)),
        ]),
        written("preempted, resumed with a hit, scheduled further", [
            Says((Runs("a", 0, 3, (0, 1)),)),
            Says((Runs("a", 2, 3, (0, 2, 3), "resumed"),), preempted=("a",)),
        ]),
        written("the older owner's deferred rows are late", [
            Says((Runs("a", 0, 2, (0,)),)),
            Says((Runs("b", 0, 2, (0,)),)),
            Says((Runs("c", 2, 1, (0, 1)),), ended=("a", "b")),
        ]),
        written("a forward that fails on recycled slots", [
            first,
            Says((Runs("c", 0, 2, (1,)),), ended=("a",), saved=False),
            Says((Runs("d", 2, 1, (1, 3)),), ended=("c",)),
        ]),
        written("one page, whole budgets", [
            first,
            hit,
            Says((Runs("c", 0, 3, (2, 3)),), ended=("b",)),
        ], staging_depth=1, device_staging_bytes_max=16),
    )  # fmt: skip
    return {trace.name: trace for trace in traces}
