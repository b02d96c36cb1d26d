"""One step from its start to its consumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slotmirror.core.block_pool import OpenKey
from slotmirror.core.events import Int64Array, StepEvents, ranges
from slotmirror.core.hits import NO_HITS, Hits
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.operations import GatherTask
from slotmirror.core.staging import StagingPage


@dataclass(slots=True, eq=False)
class Step:
    """A step's plan, and from its save on what it holds.

    The manager lock covers `consuming` and `delivered_before`. The rest is written by the engine
    thread before the step id is given out.

    owners            (R,) owner row of each request
    ends              (R,) position after each request's last row that may be delivered
    replays           indices of requests that begin below what they saved before (L3)
    drafted           indices of requests with unverified drafts; empty once verified (L7)
    consuming         whether it is being materialized right now

    From its save on:

    order             order of requests on the page, or None for the batch order
    delivered_before  (R,) positions up to which earlier steps have delivered each request; final
                      when the step is consumed, for a replay's earlier steps go first (L3)
    """

    step_id: int
    events: StepEvents
    hits: Hits
    gathers: dict[str, GatherTask]
    epoch: int
    owners: Int64Array
    ends: Int64Array
    replays: Int64Array
    drafted: Int64Array
    consuming: bool = False
    order: Int64Array | None = None
    saved_keys: tuple[OpenKey, ...] = ()
    leftovers: LeftoverPack | None = None
    page: StagingPage = field(init=False)
    delivered_before: Int64Array = field(init=False)

    def missing_in(self, wanted: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Requests among these with hit rows to deliver whose hidden states are neither in the
        pool nor computed by the step, and the slots of these rows (D5).

        What an earlier step has delivered already is not read, so it is not missed (L2).
        """
        hits, spans = self.hits, self.hits.spans
        if hits is NO_HITS or HIDDEN_KEY not in [key.name for key in self.saved_keys]:
            return []
        request = np.repeat(spans.request, spans.length)
        position = np.repeat(spans.first, spans.length) + ranges(spans.length)
        missing = (hits.own_row < 0) & (position >= self.delivered_before[request])
        if HIDDEN_KEY in self.gathers:
            missing &= ~hits.present[:, self.gathers[HIDDEN_KEY].key.index]
        req_ids = self.events.req_ids
        return [
            (req_ids[i], spans.slots[missing & (request == i)].tolist())
            for i in np.unique(request[missing]).tolist()
            if req_ids[i] in wanted
        ]
