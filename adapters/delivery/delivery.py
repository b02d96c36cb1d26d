"""Consumes a cache's steps off the engine thread and hands whole requests to the sink.

Threads: the engine thread posts; one thread materializes and assembles, in step order, so that
replays follow their owner's earlier steps (L3); the sink's queue has a writer of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from slotmirror.adapters.delivery.assembly import RequestAssembler
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.sink import SinkQueue
from slotmirror.adapters.errors import DeliveryError, DeliveryTimeoutError
from slotmirror.core.errors import MissingRowsError, without_tracebacks
from slotmirror.core.merge import StageOutputs

_LOG = logging.getLogger(__name__)


class StepSource(Protocol):
    """The consumer's side of a cache: `PrefixCacheManager`, or the stand-in without a pool."""

    def materialize(self, step_id: int, req_ids: Sequence[str] | None = None) -> StageOutputs:
        """The step's outputs of these requests; consumes the step."""

    def discard_step(self, step_id: int) -> None:
        """Consume the step without its rows."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step whose rows are saved: its id and requests, and where drafts were accepted (L7)."""

    step_id: int
    req_ids: tuple[str, ...]
    accepted_ends: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine thread posts; carried out in this sequence: ended, begun, step."""

    ended: tuple[str, ...] = ()
    begun: tuple[tuple[str, int], ...] = ()
    step: SavedStep | None = None
    end_all: bool = False


@dataclass(slots=True)
class DeliveryStats:
    """Counters of the delivery thread."""

    steps_consumed: int = 0
    steps_skipped: int = 0
    requests_missing_rows: int = 0
    last_missing: tuple[str, ...] = field(default_factory=tuple)


class Delivery:
    """Takes orders of the engine thread; delivers in the background; fails loudly."""

    def __init__(
        self, source: StepSource, assembler: RequestAssembler, queue: SinkQueue, *, name: str
    ) -> None:
        self.stats = DeliveryStats()
        self._source = source
        self._assembler = assembler
        self._queue = queue
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._busy = False
        self._closing = False
        self._failure: BaseException | None = None
        # A daemon, as the sink's writer: a dead engine must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, order: Order) -> None:
        """Queue an order; never blocks. Raises `DeliveryError` if delivery has failed."""
        with self._changed:
            self._raise_failure()
            self._orders.append(order)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until every order is carried out and every whole request is written."""
        with self._changed:
            idle = self._changed.wait_for(self._is_idle, timeout_s)
            self._raise_failure()
            if not idle:
                raise DeliveryTimeoutError(
                    f"{len(self._orders)} orders are not carried out after {timeout_s} s"
                )
        self._queue.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Carry out what is posted, within `timeout_s`, and end the threads; twice is harmless."""
        with self._changed:
            self._changed.wait_for(self._is_idle, timeout_s)
            self._closing = True
            self._changed.notify_all()
        self._queue.close(timeout_s)
        self._thread.join()

    def counters(self) -> dict[str, object]:
        """Counters of delivery and sink, by name; they may be a request apart."""
        delivery = {
            **asdict(self.stats),
            "requests_incomplete": self._assembler.requests_incomplete,
        }
        return {"delivery": delivery, "sink": asdict(self._queue.stats)}

    def _is_idle(self) -> bool:
        return self._failure is not None or not (self._orders or self._busy)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise DeliveryError(
                f"delivery failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._orders or self._closing)
                if not self._orders:
                    return
                order = self._orders.popleft()
                self._busy = True
                failed = self._failure is not None
            if not failed:
                self._carry_out_or_fail(order)
            elif order.step is not None:
                self._release(order.step)

    def _carry_out_or_fail(self, order: Order) -> None:
        try:
            self._carry_out(order)
        except BaseException as error:  # whatever it is, the engine must hear of it
            with self._changed:
                self._failure = without_tracebacks(error)

    def _carry_out(self, order: Order) -> None:
        assembler = self._assembler
        whole = assembler.end_all() if order.end_all else assembler.end(order.ended)
        for req_id, num_prompt_tokens in order.begun:
            assembler.begin(req_id, num_prompt_tokens)
        if order.step is not None:
            whole += self._consume(order.step)
        for request in whole:
            self._queue.put(request)

    def _consume(self, step: SavedStep) -> list[RequestRows]:
        """Materialize the requests that are still collected; the others cost no copy."""
        wanted = self._assembler.wants(step.req_ids)
        if not wanted:
            self._source.discard_step(step.step_id)
            self.stats.steps_skipped += 1
            return []
        try:
            outputs = self._source.materialize(step.step_id, wanted)
        except MissingRowsError as error:
            return self._consume_without(step, error)
        self.stats.steps_consumed += 1
        return self._assembler.add(outputs, step.accepted_ends)

    def _consume_without(self, step: SavedStep, error: MissingRowsError) -> list[RequestRows]:
        """One bad request does not cost the others their rows (D5)."""
        _LOG.warning("requests are not delivered: %s", error)
        self.stats.requests_missing_rows += len(error.req_ids)
        self.stats.last_missing = error.req_ids
        self._assembler.spoil(error.req_ids)
        return self._consume(step)

    def _release(self, step: SavedStep) -> None:
        """Delivery has failed, but the engine must reach its next step to say so."""
        try:
            self._source.discard_step(step.step_id)
        except Exception as error:
            _LOG.warning("step %s is not released: %s", step.step_id, error)
