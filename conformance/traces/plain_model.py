"""The stage-output cache as plain dictionaries: what every consumer must get, and nothing else.

Rows are numbers (stamps), the pool is a dictionary of dictionaries, and everything happens at
once. It shares no code with the cache and follows the spec's sentences one by one.

Consumers may be at work while the engine starts a step; whether such a delivery still counted is
then unknown, so a hit may begin at one of a few positions: the model keeps all of them and the
delivered span says which it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slotmirror.conformance.traces.rows import NO_ROW
from slotmirror.conformance.traces.trace import Part, TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY

Span = tuple[int, int]


class WrongDelivery(AssertionError):
    """A consumer got something else than the dictionaries say, or was refused without reason."""


@dataclass(slots=True, eq=False)
class ModelPart:
    """One request of one step. `firsts` are the positions at which its rows may begin."""

    part: Part
    firsts: tuple[int, ...]
    saved_before: int
    hit_rows: dict[str, dict[int, int]]

    def may_replay(self) -> bool:
        """Whether it may give positions that an earlier step of its owner saved (L3)."""
        return min(self.firsts) < self.saved_before

    def must_replay(self) -> bool:
        """Whether it certainly does."""
        return max(self.firsts) < self.saved_before

    def missing(self, first: int) -> bool:
        """Whether a position of its hit from `first` on has no hidden row (D5)."""
        hidden = self.hit_rows.get(HIDDEN_KEY, {})
        return any(position not in hidden for position in range(first, len(self.part.hit_slots)))


@dataclass(slots=True, eq=False)
class ModelStep:
    """One saved step that waits for its consumer. `keys` are those that it computed."""

    step_id: int
    parts: dict[str, ModelPart]
    keys: tuple[str, ...]
    leftover: bool
    pool_slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class KeyRows:
    """What one request is to get of one key."""

    span: Span
    stamps: list[int]


@dataclass(slots=True, eq=False)
class PlainModel:
    """Slots, owners and deliveries as dictionaries."""

    needs_hidden: bool
    slots: dict[int, dict[str, int]] = field(default_factory=dict)
    unconsumed: dict[int, ModelStep] = field(default_factory=dict)
    in_flight: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Steps that a consumer is at work on, and the requests that it asked for."""
    counts: Counter[str] = field(default_factory=Counter)
    _deliveries: list[tuple[int, int, int]] = field(default_factory=list)
    """(owner, step id, position after the last row), in the order of their ends."""
    _saved: dict[int, int] = field(default_factory=dict)
    _unverified: int | None = None
    """The last saved step, if it has drafts (L7)."""
    _open: dict[str, ModelPart] = field(default_factory=dict)
    _keeps_open: bool = True

    def count(self, what: str, times: int) -> None:
        """Something happened so many times."""
        self.counts[what] += times

    # -- the engine -------------------------------------------------------------------------

    def mark(self) -> int:
        """To be taken before the engine starts a step, and handed to `start`."""
        return len(self._deliveries)

    def start(self, step: TraceStep, mark: int) -> None:
        """Claim the step's slots, then note for each hit what the pool has (C2)."""
        self._unverified = None
        claimed = {slot for part in step.parts for slot in part.slots}
        for slot in claimed:
            self.slots.pop(slot, None)
        for waiting in self.unconsumed.values():
            self.counts["reads after recycling"] += not waiting.pool_slots.isdisjoint(claimed)
        self._keeps_open = True
        self._open = {part.req_id: self._planned(part, mark) for part in step.parts}

    def _planned(self, part: Part, mark: int) -> ModelPart:
        firsts = {part.first}
        if part.hit_slots:
            firsts = {min(part.first, end) for end in self._delivered_ends(part.owner, mark)}
        found: dict[str, dict[int, int]] = {}
        for position in range(min(firsts), len(part.hit_slots)):
            for key, stamp in self.slots.get(part.hit_slots[position], {}).items():
                found.setdefault(key, {})[position] = stamp
        return ModelPart(part, tuple(firsts), self._saved.get(part.owner, 0), found)

    def _delivered_ends(self, owner: int, mark: int) -> set[int]:
        """Where the owner's delivered rows may end: calls in flight since `mark` may count."""
        certain = max((end for o, _, end in self._deliveries[:mark] if o == owner), default=0)
        late = [end for o, _, end in self._deliveries[mark:] if o == owner]
        for step_id, names in self.in_flight.items():
            parts = self.unconsumed[step_id].parts
            late += [parts[n].part.accepted for n in names if parts[n].part.owner == owner]
        return {certain, *(max(certain, end) for end in late)}

    def reset(self) -> None:
        """Forget every row; an open step is delivered but not kept (R1)."""
        self.slots.clear()
        self._keeps_open = False

    def save(self, step_id: int, step: TraceStep) -> None:
        """Write the step's rows, then complete the hits that it computed itself (H1)."""
        written: dict[int, dict[str, int]] = {}
        for entry in self._open.values():
            part = entry.part
            for row, slot in enumerate(part.slots):
                written[slot] = dict.fromkeys(step.keys, part.stamps + row)
            self._saved[part.owner] = max(self._saved.get(part.owner, 0), part.accepted)
        if self._keeps_open:
            self.slots.update({slot: keys for slot, keys in written.items() if keys})
        pool_slots: set[int] = set()
        for entry in self._open.values():
            for position in range(min(entry.firsts), len(entry.part.hit_slots)):
                slot = entry.part.hit_slots[position]
                if slot not in written:
                    pool_slots.add(slot)
                    continue
                self.counts["same-step hit rows"] += 1
                for key, stamp in written[slot].items():
                    entry.hit_rows.setdefault(key, {})[position] = stamp
        self.unconsumed[step_id] = ModelStep(
            step_id, self._open, step.keys, step.leftover, frozenset(pool_slots)
        )
        if any(entry.part.drafted for entry in self._open.values()):
            self._unverified = step_id
        self._open = {}

    # -- the consumers ----------------------------------------------------------------------

    def begin(self, step_id: int, names: tuple[str, ...]) -> None:
        """A consumer asks for these requests of a step, none for a discard."""
        self.in_flight[step_id] = names

    def refused(self, step_id: int) -> None:
        """It was refused; the step waits for another call."""
        del self.in_flight[step_id]

    def consumed(self, step_id: int) -> None:
        """The step was consumed, and those requests delivered."""
        names = self.in_flight.pop(step_id)
        step = self.unconsumed.pop(step_id)
        for name in names:
            part = step.parts[name].part
            self._deliveries.append((part.owner, step_id, part.accepted))

    def unverified(self, step_id: int) -> bool:
        """Whether the step has drafts that no later step has verified (L7)."""
        return self._unverified == step_id

    def may_wait_for(self, step_id: int) -> set[int]:
        """Earlier unconsumed steps of owners that this step may replay (L3)."""
        return self._earlier(
            step_id, {p.part.owner for p in self._parts(step_id) if p.may_replay()}
        )

    def must_wait_for(self, step_id: int) -> set[int]:
        """Those of owners that it certainly replays, and that nobody is consuming."""
        owners = {p.part.owner for p in self._parts(step_id) if p.must_replay()}
        return self._earlier(step_id, owners) - self.in_flight.keys()

    def _parts(self, step_id: int) -> list[ModelPart]:
        return list(self.unconsumed[step_id].parts.values())

    def _earlier(self, step_id: int, owners: set[int]) -> set[int]:
        return {
            other.step_id
            for other in self.unconsumed.values()
            if other.step_id < step_id
            and any(entry.part.owner in owners for entry in other.parts.values())
        }

    def may_miss(self, step_id: int, name: str) -> bool:
        """Whether the request may be refused for absent hidden rows (D5)."""
        return self.needs_hidden and any(self._missing(step_id, name))

    def must_miss(self, step_id: int, name: str) -> bool:
        """Whether it must be refused."""
        return self.needs_hidden and all(self._missing(step_id, name))

    def _missing(self, step_id: int, name: str) -> list[bool]:
        """For each position at which its rows may begin: whether one of them is absent."""
        entry = self.unconsumed[step_id].parts[name]
        return [entry.missing(self._cut(step_id, entry, first)) for first in entry.firsts]

    def expected(self, step_id: int, name: str) -> list[tuple[Span, dict[str, KeyRows]]]:
        """(span, key → its span and rows): what the request may get now (D1-D6, L2).

        One entry unless a delivery was under way when the step started. To be asked for when the
        call has returned, before `consumed`.
        """
        entry = self.unconsumed[step_id].parts[name]
        return [self._expected_from(step_id, entry, first) for first in entry.firsts]

    def _expected_from(
        self, step_id: int, entry: ModelPart, region_first: int
    ) -> tuple[Span, dict[str, KeyRows]]:
        step, part = self.unconsumed[step_id], entry.part
        first = self._cut(step_id, entry, region_first)
        keys = {}
        for key in {*step.keys, *entry.hit_rows}:
            hits = entry.hit_rows.get(key, {})
            in_step = key in step.keys
            if not in_step and not any(position >= region_first for position in hits):
                continue
            end = part.accepted if in_step else part.first
            key_first = min(first, end)
            stamps = [hits.get(p, NO_ROW) for p in range(key_first, min(part.first, end))]
            computed = range(max(key_first, part.first), end)
            stamps += [part.stamps + position - part.first for position in computed]
            keys[key] = KeyRows((key_first, end), stamps)
        return (first, part.accepted), keys

    def _cut(self, step_id: int, entry: ModelPart, region_first: int) -> int:
        """Where the rows begin: a replay gives nothing that was delivered already (L2, L3)."""
        if region_first >= entry.saved_before:
            return region_first
        delivered = self._delivered_before(entry.part.owner, step_id)
        return max(region_first, min(delivered, entry.part.accepted))

    def _delivered_before(self, owner: int, step_id: int) -> int:
        """Position up to which earlier steps delivered; a replay comes after all of them (L3)."""
        ends = [end for o, other, end in self._deliveries if o == owner and other < step_id]
        for other, names in self.in_flight.items():
            if other < step_id:
                parts = self.unconsumed[other].parts
                ends += [parts[n].part.accepted for n in names if parts[n].part.owner == owner]
        return max(ends, default=0)
