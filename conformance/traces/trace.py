"""One trace: what the engine said and what the stage computed, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from slotmirror.conformance.traces.rows import RowTable
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import StepEvents
from slotmirror.core.policy import ModelCachePolicy

PADDING_MAX = 2
"""Rows of padding of a step at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one request does in a step.

    owner      number of the request's generation: who is delivered, whatever the name (L4)
    req_id     its name
    first      position of the first token that it computes
    slots      the slot of each of its tokens
    hit_slots  the slots of positions 0 … hit-1 that the cache serves; empty without a hit
    stamps     first stamp of its rows; row i of the part has stamp `stamps + i`
    accepted   position up to which its rows stay: below `end` where drafts are rejected (L7)
    drafted    whether some of its tokens are drafts
    """

    owner: int
    req_id: str
    first: int
    slots: tuple[int, ...]
    hit_slots: tuple[int, ...]
    stamps: int
    accepted: int
    drafted: bool = False

    @property
    def end(self) -> int:
        """Position after its last token, drafts included."""
        return self.first + len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One step of the engine.

    events   for `new_step_starts`
    parts    the scheduled requests in batch order
    saved    whether the forward ends well and its outputs are saved (C3)
    keys     the keys that it computes, hidden states included
    order    the order of the requests' rows in the tensors (S4)
    padding  rows of padding behind them; each key in `padded` has it (D7, bug 21)
    refused  a key that is given with a wrong width at first: the save is repeated (D8)
    leftover whether the step has a leftover
    reset    the engine resets its cache before the step, or while it runs (R1)
    """

    events: StepEvents
    parts: tuple[Part, ...] = ()
    saved: bool = True
    keys: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    padding: int = 0
    padded: frozenset[str] = frozenset()
    refused: str | None = None
    leftover: bool = False
    reset: str = ""

    def padding_of(self, key: str) -> int:
        """Rows of padding behind the key's rows."""
        return self.padding if key in self.padded else 0


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Everything that a run needs besides its schedule; `rows` are the bytes that it computes."""

    name: str
    config: PrefixCacheConfig
    policy: ModelCachePolicy
    steps: tuple[TraceStep, ...]
    rows: RowTable
