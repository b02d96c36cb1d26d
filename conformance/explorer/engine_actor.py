"""The engine's thread: plays a trace's steps on a manager, and ends as an engine ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

from slotmirror.conformance.explorer.faults import Judge, Reaction
from slotmirror.conformance.explorer.inbox import Inbox
from slotmirror.conformance.explorer.stage import AnyStage
from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.trace import Trace, TraceStep
from slotmirror.core.errors import KeyLayoutError
from slotmirror.core.manager import PrefixCacheManager

T = TypeVar("T")


class EngineStops(Exception):
    """The cache has failed; the engine makes no more calls."""


class EngineActor:
    """Runs on the engine's actor; the judge says which errors of the cache have a reason."""

    def __init__(
        self,
        trace: Trace,
        cache: PrefixCacheManager,
        model: PlainModel,
        stage: AnyStage,
        inbox: Inbox,
        saved_steps: dict[int, TraceStep],
        judge: Judge,
    ) -> None:
        self._trace = trace
        self._cache = cache
        self._model = model
        self._stage = stage
        self._inbox = inbox
        self._saved_steps = saved_steps
        self._judge = judge
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """All steps of the trace, or those until the cache fails."""
        try:
            for step in self._trace.steps:
                self._one_step(step)
        except EngineStops:
            self.counts["failed caches"] += 1

    def _judged(self, call: Callable[[], T], passes: type[Exception] | tuple[()] = ()) -> T:
        """One call of the cache, made again where the judge says so; `passes` is expected."""
        while True:
            try:
                return call()
            except passes:
                raise
            except Exception as error:
                if self._judge.judge(error) is not Reaction.RETRY:
                    raise EngineStops from error

    def _one_step(self, step: TraceStep) -> None:
        if step.reset == "before":
            self._reset()
        mark = self._model.mark()
        self._judged(lambda: self._cache.new_step_starts(step.events))
        self._model.start(step, mark)
        self._inbox.progress()
        if step.reset == "during":
            self._reset()
        if step.saved:
            self._save(step)

    def _reset(self) -> None:
        self._judged(self._cache.reset)
        self._model.reset()
        self.counts["resets"] += 1

    def _save(self, step: TraceStep) -> None:
        hidden, outputs = self._stage.forward(step)
        if step.refused is not None:
            self._expect_refusal(step, step.refused, hidden, outputs)
        step_id = self._judged(lambda: self._call(step, hidden, outputs))
        self._stage.overwrite()
        self._model.save(step_id, step)
        self._saved_steps[step_id] = step
        self._inbox.put(step_id)

    def _expect_refusal(
        self, step: TraceStep, key: str, hidden: torch.Tensor | None, outputs: dict[str, object]
    ) -> None:
        num_rows = sum(len(part.slots) for part in step.parts)
        wrong = {**outputs, key: self._stage.wrong_width(key, num_rows)}
        try:
            self._judged(lambda: self._call(step, hidden, wrong), KeyLayoutError)
        except KeyLayoutError:
            self.counts["refused keys"] += 1
            return
        raise AssertionError(f"key {key} was taken with another width")

    def _call(
        self, step: TraceStep, hidden: torch.Tensor | None, outputs: dict[str, object]
    ) -> int:
        num_rows = sum(len(part.slots) for part in step.parts)
        return self._cache.save_outputs(
            hidden,
            outputs,
            num_tokens_unpadded=num_rows,
            num_tokens_padded=num_rows + step.padding,
            req_ids=step.order,
        )
