"""The two-stage pipeline: *thinker* → *talker*.

The thinker's full-prompt hidden rows, put together from prefix hits and computed tails, are the
talker's input. Both stages run on the calling thread, their builders beside it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.registry import load_backend
from slotmirror.engine.errors import RequestError
from slotmirror.engine.models.base import HIDDEN_KEY
from slotmirror.engine.pipeline_types import (
    STAGES,
    TALKER,
    THINKER,
    PipelineConfig,
    PipelineOutput,
    PipelineRequest,
    PipelineResult,
)
from slotmirror.engine.stage import Stage, StageRequest
from slotmirror.engine.stage_models import build_stage_model
from slotmirror.engine.stage_output import StageOutput
from slotmirror.engine.turn_order import TurnOrder

ProgressCallback = Callable[[int, int], None]
OutputCallback = Callable[[PipelineOutput], None]


class Pipeline:
    """Serves requests through both stages. One thread; use as a context manager or `shutdown`.

    `backend` replaces the one that `config.backend` names. Raises the registry's errors for a
    backend that is not installed or not available.
    """

    def __init__(self, config: PipelineConfig, backend: DeviceBackend | None = None) -> None:
        self.config = config
        self._backend = backend if backend is not None else load_backend(config.backend)
        self._stages = {
            name: Stage(
                config.stage(name),
                build_stage_model(config, name, self._backend.device),
                self._backend,
                committer=config.committer,
                staging_depth=config.staging_depth,
            )
            for name in STAGES
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def run(
        self,
        requests: Iterable[PipelineRequest],
        *,
        progress: ProgressCallback | None = None,
        on_output: OutputCallback | None = None,
        forced: Mapping[str, PipelineOutput] | None = None,
    ) -> PipelineResult:
        """Serve `requests` until all have left the pipeline.

        progress   called with (requests done, all requests) whenever one leaves
        on_output  takes each output instead of `PipelineResult.outputs`
        forced     outputs of another run, whose decoded tokens are taken instead of the models'
                   own: a rounding difference must not send two runs on different texts

        Raises `RequestError` before anything ran for requests that can never be served, for
        duplicate ids and for an `after` that names no earlier request; `EngineError` and the
        cache's errors when a part fails: shut the pipeline down then.
        """
        batch = list(requests)
        self._check_fit(batch)
        run = _PipelineRun(self._stages, TurnOrder(batch), self.config, forced or {})
        outputs: dict[str, PipelineOutput] = {}
        start = time.perf_counter()
        for done, output in enumerate(run.outputs(), start=1):
            if on_output is None:
                outputs[output.req_id] = output
            else:
                on_output(output)
            if progress is not None:
                progress(done, len(batch))
        return PipelineResult(
            wall_seconds=time.perf_counter() - start,
            stages={name: stage.report() for name, stage in self._stages.items()},
            outputs=outputs,
        )

    def shutdown(self) -> None:
        """End both stages and their threads; twice is harmless."""
        with ExitStack() as ending:
            for stage in self._stages.values():
                ending.callback(stage.shutdown)

    def _check_fit(self, requests: list[PipelineRequest]) -> None:
        for name in STAGES:
            stage = self.config.stage(name)
            capacity = (stage.num_blocks - 1) * stage.block_size
            for request in requests:
                # The last decoded token takes a place in the sequence, if not a row.
                needed = request.num_rows(name) + 1
                if needed > capacity:
                    raise RequestError(
                        f"request {request.req_id!r} needs {needed} tokens in stage {name!r}, its "
                        f"KV cache holds {capacity}: raise num_blocks={stage.num_blocks} "
                        f"(block_size={stage.block_size})"
                    )


class _PipelineRun:
    """One call of `Pipeline.run`: admits requests, steps the stages, hands outputs on."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        order: TurnOrder,
        config: PipelineConfig,
        forced: Mapping[str, PipelineOutput],
    ) -> None:
        self._stages = stages
        self._order = order
        self._lag_rounds = config.handover_lag_steps
        self._forced = forced
        self._requests: dict[str, PipelineRequest] = {}
        self._thinker_outputs: dict[str, StageOutput] = {}
        self._finished: deque[tuple[int, str, str]] = deque()
        """(round, stage, request) of requests whose output is not fetched yet, oldest first."""

    def outputs(self) -> Iterable[PipelineOutput]:
        """Run to the end, giving every request's output as it leaves.

        An output is fetched a fixed number of rounds after its last step, or as soon as no stage
        has anything else to do: schedules do not depend on how fast the builders are.
        """
        self._admit(self._order.first())
        current = 0
        while self._finished or any(stage.has_work for stage in self._stages.values()):
            current += 1
            idle = True
            for name, stage in self._stages.items():
                if stage.has_work:
                    idle = False
                    self._finished.extend((current, name, req_id) for req_id in stage.step())
            while self._finished and (idle or self._finished[0][0] <= current - self._lag_rounds):
                _, name, req_id = self._finished.popleft()
                yield from self._hand_on(name, self._stages[name].take_output(req_id))
                idle = False

    def _admit(self, requests: Iterable[PipelineRequest]) -> None:
        for request in requests:
            forced = self._forced.get(request.req_id)
            self._requests[request.req_id] = request
            self._stages[THINKER].add(
                StageRequest(
                    request.req_id,
                    tuple(request.token_ids),
                    request.max_tokens,
                    cache_salt=request.stage_salt(THINKER),
                    mm_features=request.mm_features,
                    forced_tokens=None if forced is None else forced.thinker.output_token_ids,
                )
            )

    def _hand_on(self, stage: str, output: StageOutput) -> Iterable[PipelineOutput]:
        """The thinker's output goes to the talker, the talker's out of the pipeline."""
        req_id = output.req_id
        if stage == THINKER:
            self._thinker_outputs[req_id] = output
            self._start_talker(self._requests[req_id], output)
            return
        request = self._requests.pop(req_id)
        self._admit(self._order.released_by(req_id))
        yield PipelineOutput(req_id, request, self._thinker_outputs.pop(req_id), output)

    def _start_talker(self, request: PipelineRequest, thinker: StageOutput) -> None:
        forced = self._forced.get(request.req_id)
        self._stages[TALKER].add(
            StageRequest(
                request.req_id,
                tuple(request.token_ids),
                request.max_frames,
                cache_salt=request.stage_salt(TALKER),
                upstream=thinker.complete_rows(HIDDEN_KEY, len(request.token_ids)),
                forced_tokens=None if forced is None else forced.talker.output_token_ids,
            )
        )
