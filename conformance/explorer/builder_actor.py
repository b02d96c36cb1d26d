"""A builder's thread: materialises steps in any order, retries what was refused for a reason,
wants rows on the host or on the device, and reads them at once or much later."""

from __future__ import annotations

import random
from collections import Counter

from slotmirror.conformance.explorer.faults import ActorKilled, Judge, Reaction
from slotmirror.conformance.explorer.inbox import Inbox
from slotmirror.conformance.explorer.output_reader import OutputReader
from slotmirror.conformance.traces.delivery_check import DeliveryCheck
from slotmirror.conformance.traces.plain_model import PlainModel, WrongDelivery
from slotmirror.conformance.traces.rows import RowTable
from slotmirror.conformance.traces.trace import TraceStep
from slotmirror.core.errors import (
    CacheShutDownError,
    MissingRowsError,
    ReplayOrderError,
    StepStateError,
)
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.merge import StageOutputs


class CacheEnds(Exception):
    """No step will be delivered any more."""


class BuilderActor:
    """Runs on a builder's actor.

    `discards`, `picks`, `on_device` are the chances of what else it does; it holds up to
    `holds_max` outputs that it has not read.
    """

    def __init__(
        self,
        cache: PrefixCacheManager,
        model: PlainModel,
        inbox: Inbox,
        table: RowTable,
        saved_steps: dict[int, TraceStep],
        rng: random.Random,
        judge: Judge,
        reader: OutputReader,
        *,
        discards: float = 0.05,
        picks: float = 0.1,
        on_device: float = 0.0,
        holds_max: int = 2,
    ) -> None:
        self._cache = cache
        self._model = model
        self._inbox = inbox
        self._table = table
        self._saved_steps = saved_steps
        self._rng = rng
        self._judge = judge
        self._discards = discards
        self._picks = picks
        self._on_device = on_device
        self._reader = reader
        self._holds_max = holds_max
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Until the engine has closed the inbox and nothing is left, or the cache has ended."""
        try:
            while (step_id := self._inbox.take()) is not None:
                self._consume(step_id)
                self._read(self._rng.randrange(self._holds_max + 1))
            self._read(0)
        except ActorKilled:
            return
        finally:
            self._reader.forget()

    def _consume(self, step_id: int) -> None:
        try:
            if self._rng.random() < self._discards:
                self._discard(step_id)
            else:
                self._materialize(step_id, self._wanted(step_id))
        except CacheEnds:
            self._model.refused(step_id)
            self._inbox.drop(step_id)
        except ActorKilled:
            self._model.refused(step_id)
            self._inbox.leave(step_id)
            raise

    def _read(self, left: int) -> None:
        held = len(self._reader)
        self.counts["rows read on the device"] += self._reader.read(left)
        self.counts["outputs read late"] += max(held - 1 - left, 0)

    def _wanted(self, step_id: int) -> tuple[str, ...]:
        names = tuple(self._model.unconsumed[step_id].parts)
        if self._rng.random() < self._picks:
            return tuple(name for name in names if self._rng.random() < 0.5)
        return names

    def _discard(self, step_id: int) -> None:
        self._model.begin(step_id, ())
        try:
            self._cache.discard_step(step_id)
        except Exception as error:
            self._react(step_id, error)
            return
        self._consumed(step_id)
        self.counts["discards"] += 1

    def _materialize(self, step_id: int, names: tuple[str, ...]) -> None:
        """One call; a request without its rows is left out and the rest asked for again."""
        unverified = self._model.unverified(step_id)
        earlier = self._model.may_wait_for(step_id)
        self._model.begin(step_id, names)
        try:
            on_device = self._rng.random() < self._on_device
            out = self._cache.materialize(step_id, names, device=on_device)
        except ReplayOrderError as error:
            if not set(error.earlier) <= earlier:
                raise WrongDelivery(f"step {step_id} waits for {error.earlier}") from error
            self._refused(step_id, "replays asked for too early")
        except MissingRowsError as error:
            self._without(step_id, names, error)
        except StepStateError as error:
            if self._closing(error):
                raise CacheEnds from error
            if not unverified:
                raise WrongDelivery(f"step {step_id} was refused: {error}") from error
            self._refused(step_id, "unverified drafts asked for")
        except Exception as error:
            self._react(step_id, error)
        else:
            self._check(step_id, names, out)
            self._consumed(step_id)

    def _react(self, step_id: int, error: Exception) -> None:
        """Another error than those that a builder must expect."""
        if self._closing(error):
            raise CacheEnds from error
        reaction = self._judge.judge(error)
        if reaction is Reaction.STOP:
            raise CacheEnds from error
        if reaction is Reaction.DISCARD:
            self._model.refused(step_id)
            self._discard(step_id)
        else:
            self.counts["calls made again after a fault"] += 1
            self._model.refused(step_id)
            self._inbox.leave(step_id)

    def _closing(self, error: Exception) -> bool:
        """Whether the call came too late: the engine shuts the cache down."""
        return isinstance(error, CacheShutDownError) and self._inbox.closed

    def _without(self, step_id: int, names: tuple[str, ...], error: MissingRowsError) -> None:
        wrong = [name for name in error.req_ids if not self._model.may_miss(step_id, name)]
        if wrong or not set(error.req_ids) <= set(names):
            raise WrongDelivery(f"step {step_id}: {wrong} are said to lack rows") from error
        self._model.refused(step_id)
        self.counts["hits without rows"] += len(error.req_ids)
        self._materialize(step_id, tuple(n for n in names if n not in error.req_ids))

    def _check(self, step_id: int, names: tuple[str, ...], out: StageOutputs) -> None:
        late = self._model.must_wait_for(step_id)
        lacking = [name for name in names if self._model.must_miss(step_id, name)]
        if late or lacking:
            raise WrongDelivery(f"step {step_id} came before {late}, or without rows of {lacking}")
        check = DeliveryCheck(self._model, self._table, self._saved_steps[step_id])
        check.note(step_id, names, out)
        self._reader.put(check, out.arrival)

    def _refused(self, step_id: int, why: str) -> None:
        self.counts[why] += 1
        self._model.refused(step_id)
        self._inbox.put_back(step_id)

    def _consumed(self, step_id: int) -> None:
        self._model.consumed(step_id)
        self._inbox.done(step_id)
