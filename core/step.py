"""One step from its start to its consumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.errors import EngineDivergenceError, InternalError
from slotmirror.core.events import Int64Array, StepEvents
from slotmirror.core.hits import Hits
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.operations import GatherTask
from slotmirror.core.staging import StagingPage

_NONE: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class MissingRows:
    """Hit rows whose hidden states are absent (D5): index of the request, position, slot; (M,)."""

    request: Int64Array
    position: Int64Array
    slot: Int64Array


NOTHING_MISSING = MissingRows(_NONE, _NONE, _NONE)


class StepState(Enum):
    """Where a step stands; `unconsumed.py` moves it."""

    OPEN = "open"
    SAVED = "saved"
    CONSUMING = "consuming"


@dataclass(slots=True, eq=False)
class Step:
    """A step's plan, and from its save on what it holds.

    The manager lock covers `state` and `delivered_before`. The rest is written by the engine
    thread before the step id is given out.

    owners            (R,) owner row of each request
    ends              (R,) position after each request's last row that may be delivered
    replays           indices of requests that begin below what they saved before (L3)
    drafted           indices of requests with unverified drafts; empty once verified (L7)
    delivered_before  (R,) positions up to which earlier steps have delivered each request; final
                      when the step is consumed, for a replay's earlier steps go first (L3)
    order             order of requests on the page, or None for the batch order
    """

    step_id: int
    events: StepEvents
    hits: Hits
    gathers: dict[str, GatherTask]
    missing: MissingRows
    epoch: int
    owners: Int64Array
    ends: Int64Array
    replays: Int64Array
    drafted: Int64Array
    delivered_before: Int64Array = field(default_factory=lambda: _NONE)
    state: StepState = StepState.OPEN
    order: Int64Array | None = None
    page: StagingPage | None = None
    saved_keys: tuple[OpenKey, ...] = ()
    leftovers: LeftoverPack | None = None

    @property
    def req_ids(self) -> tuple[str, ...]:
        """The scheduled requests, in batch order."""
        return self.events.req_ids

    @property
    def saved_page(self) -> StagingPage:
        """The page of a saved step."""
        if self.page is None:
            raise InternalError(f"step {self.step_id} has no page: it was not saved")
        return self.page

    def verified_ends(self, positions: Mapping[str, int]) -> Int64Array:
        """Ends of the drafted requests, cut at the accepted tokens; changes nothing (L7).

        Raises `EngineDivergenceError` for one whose accepted position is missing or impossible.
        """
        first = self.events.first_positions[self.drafted]
        names = [self.req_ids[i] for i in self.drafted.tolist()]
        ends = np.array([positions.get(name, -1) for name in names], dtype=np.int64)
        wrong = (ends <= first) | (ends > self.ends[self.drafted])
        if wrong.any():
            raise EngineDivergenceError(
                f"step {self.step_id} computed drafts of {names}: verified_positions "
                f"{dict(positions)} must name an accepted position within each one's rows"
            )
        return ends

    def settle_drafts(self, accepted: Int64Array) -> None:
        """Deliver the drafted requests up to `accepted`, which `verified_ends` gave."""
        self.ends = self.ends.copy()
        self.ends[self.drafted] = accepted
        self.drafted = _NONE

    def missing_in(self, wanted: Sequence[str] | None) -> list[tuple[str, list[int]]]:
        """Requests among these with missing rows that would be delivered, and their slots (D5).

        What an earlier step has delivered already is not read, so it is not missed (L2).
        """
        missing = self.missing
        if missing is NOTHING_MISSING:
            return []
        due = missing.position >= self.delivered_before[missing.request]
        found: list[tuple[str, list[int]]] = []
        for request in np.unique(missing.request[due]).tolist():
            req_id = self.req_ids[request]
            if wanted is None or req_id in wanted:
                found.append((req_id, missing.slot[due & (missing.request == request)].tolist()))
        return found
