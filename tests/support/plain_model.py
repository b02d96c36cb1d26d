"""The stage-output cache as plain dictionaries: what every consumer must get, and nothing else.

Rows are Python tuples, the pool is a dictionary of dictionaries, and everything happens at once.
It shares no code with the cache and follows the spec's sentences one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.toy_engine import ScheduledPart, ToyRequest, ToyStep

HIDDEN = "hidden"


def row_of(tokens: list[int], position: int, key: str) -> tuple[int, int, int]:
    """The row that a model computes: a function of the whole prefix, the position, and the key."""
    fingerprint = 0
    for token in tokens[: position + 1]:
        fingerprint = (fingerprint * 1_000_003 + token + 1) % (2**61 - 1)
    return (position, fingerprint, sum(key.encode()))


ZERO_ROW = (0, 0, 0)


@dataclass(eq=False)
class ModelPart:
    """One request of one step, and what it is to be delivered."""

    part: ScheduledPart
    region_first: int
    replay: bool
    hit_rows: dict[str, dict[int, tuple[int, int, int]]]
    missing: bool = False


@dataclass(eq=False)
class ModelStep:
    """One saved step that waits for its consumer."""

    step_id: int
    parts: dict[str, ModelPart]
    keys: list[str]
    rows: dict[str, dict[str, dict[int, tuple[int, int, int]]]] = field(default_factory=dict)


class PlainModel:
    """Slots, owners and deliveries as dictionaries."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[str, tuple[int, int, int]]] = {}
        self.deliveries: dict[ToyRequest, list[tuple[int, int]]] = {}
        self.saved: dict[ToyRequest, int] = {}
        self.unconsumed: dict[int, ModelStep] = {}
        self._open: dict[str, ModelPart] = {}
        self._last_seen: dict[str, ToyRequest] = {}

    def start(self, step: ToyStep) -> None:
        """Claim the step's slots, then note for each hit what the pool has (C2)."""
        for part in step.parts:
            for slot in part.slots:
                self.slots.pop(slot, None)
        self._open = {}
        for part in step.parts:
            request = part.request
            delivered = self._delivered_by(request, before=None)
            region_first = min(part.first, delivered) if part.hit else part.first
            replay = region_first < self.saved.get(request, 0)
            found: dict[str, dict[int, tuple[int, int, int]]] = {}
            for position in range(region_first, part.hit):
                for key, row in self.slots.get(part.hit_slots[position], {}).items():
                    found.setdefault(key, {})[position] = row
            self._open[request.req_id] = ModelPart(part, region_first, replay, found)

    def save(self, step_id: int, keys: list[str], *, needs_hidden: bool) -> None:
        """Write the step's rows, then complete the hits that it computed itself (H1)."""
        step = ModelStep(step_id, self._open, keys)
        for name, entry in self._open.items():
            part = entry.part
            for key in keys:
                rows = {
                    position: row_of(part.request.tokens, position, key)
                    for position in range(part.first, part.first + part.count)
                }
                step.rows.setdefault(name, {})[key] = rows
                for slot, row in zip(part.slots, rows.values(), strict=True):
                    self.slots.setdefault(slot, {})[key] = row
            self.saved[part.request] = max(self.saved.get(part.request, 0), part.first + part.count)
        own = {s for entry in self._open.values() for s in entry.part.slots}
        for entry in self._open.values():
            for position in range(entry.region_first, entry.part.hit):
                slot = entry.part.hit_slots[position]
                if slot in own:
                    for key in keys:
                        entry.hit_rows.setdefault(key, {})[position] = self.slots[slot][key]
            wanted = range(entry.region_first, entry.part.hit)
            entry.missing = needs_hidden and any(
                position not in entry.hit_rows.get(HIDDEN, {}) for position in wanted
            )
        self.unconsumed[step_id] = step
        self._open = {}

    def must_wait_for(self, step_id: int) -> set[int]:
        """Earlier unconsumed steps of owners that this step replays (L3)."""
        step = self.unconsumed[step_id]
        replayed = {entry.part.request for entry in step.parts.values() if entry.replay}
        return {
            other.step_id
            for other in self.unconsumed.values()
            if other.step_id < step_id
            and any(entry.part.request in replayed for entry in other.parts.values())
        }

    def expected(
        self, step_id: int, name: str
    ) -> tuple[tuple[int, int], dict[str, tuple[tuple[int, int], list[tuple[int, int, int]]]]]:
        """(span, key → (its span, its rows)) of one request, were it delivered now (D1-D6, L2)."""
        step = self.unconsumed[step_id]
        entry = step.parts[name]
        part = entry.part
        end = part.first + part.count
        first = entry.region_first
        if entry.replay:
            first = max(first, min(self._delivered_by(part.request, before=step_id), end))
        keys = {}
        for key in {*step.keys, *entry.hit_rows}:
            in_step = key in step.keys
            if not in_step and not entry.hit_rows[key]:
                continue
            key_end = end if in_step else part.first
            key_first = min(first, key_end)
            rows = []
            for position in range(key_first, key_end):
                if position < part.first:
                    rows.append(entry.hit_rows.get(key, {}).get(position, ZERO_ROW))
                else:
                    rows.append(step.rows[name][key][position])
            keys[key] = ((key_first, key_end), rows)
        return (first, end), keys

    def consumed(self, step_id: int, names: list[str]) -> None:
        """The step was consumed, and these of its requests delivered."""
        step = self.unconsumed.pop(step_id)
        for name in names:
            part = step.parts[name].part
            end = part.first + part.count
            self.deliveries.setdefault(part.request, []).append((step_id, end))

    def _delivered_by(self, request: ToyRequest, before: int | None) -> int:
        """Position up to which steps, or steps before one, have delivered the request."""
        made = self.deliveries.get(request, [])
        return max((end for step_id, end in made if before is None or step_id < before), default=0)
