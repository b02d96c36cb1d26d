"""One pipeline stage: scheduler, model runner, stage-output cache and builder thread.

A step, on the engine thread: schedule, tell the cache, run the forward, save its outputs, update
the scheduler. `materialize` is left to the builder, while the engine takes the next step. With
prefix caching off only the scheduler differs: every output still passes through the cache.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.engine.errors import EngineError, RequestError
from slotmirror.engine.models.base import StageModel
from slotmirror.engine.models.fingerprint_formula import prefix_seed
from slotmirror.engine.output_assembly import FinishedRequest, OutputAssembler, StepJob
from slotmirror.engine.output_builder import OutputBuilder
from slotmirror.engine.pipeline_types import CommitterKind, StageConfig, StageReport
from slotmirror.engine.request_states import RequestState
from slotmirror.engine.runner import ExecutedStep, Runner
from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.output import SchedulerOutput
from slotmirror.engine.stage_counters import StageCounters
from slotmirror.engine.stage_output import StageOutput
from slotmirror.engine.step_translation import StepTranslator
from slotmirror.kvcache.request import MultimodalFeature, Request, SamplingParams

BUILDER_TIMEOUT_S = 300.0
"""The longest the engine waits for its builder, which itself may wait for the device."""


_BOUNCE_BYTES = 1 << 20
"""The models here have small rows; the default would take more memory than the pool."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One request for one stage.

    upstream       (prompt tokens, width) hidden rows of the stage before, or None
    forced_tokens  `max_tokens` decoded tokens of another run, or None to decode
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    cache_salt: str | None = None
    mm_features: tuple[MultimodalFeature, ...] = ()
    upstream: torch.Tensor | None = None
    forced_tokens: Sequence[int] | None = None

    @property
    def num_rows(self) -> int:
        """Positions to compute: the last decoded token is never an input."""
        return len(self.prompt_token_ids) + self.max_tokens - 1


class Stage:
    """Serves one stage's requests. All methods belong to the engine thread.

    An error of any part, the builder's included, leaves the stage unusable: shut it down.
    """

    def __init__(
        self,
        config: StageConfig,
        model: StageModel,
        backend: DeviceBackend,
        *,
        committer: CommitterKind = "threaded",
        staging_depth: int = 4,
    ) -> None:
        self.config = config
        self._scheduler = Scheduler(_scheduler_config(config))
        self._translator = StepTranslator(
            num_blocks=config.num_blocks, block_size=config.block_size
        )
        self._runner = Runner(
            model, block_size=config.block_size, max_batched_tokens=config.max_batched_tokens
        )
        self._cache = PrefixCacheManager(
            PrefixCacheConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                staging_depth=staging_depth,
                staging_capacity_tokens=config.max_batched_tokens,
                committer=committer,
                copy_chunk_bytes=_BOUNCE_BYTES,
            ),
            backend,
        )
        self._cache.register_policy(ModelCachePolicy.from_model(model))
        self._assembler = OutputAssembler(self._cache, backend, frozenset(model.outputs))
        self._builder = OutputBuilder(
            config.name,
            build=self._assembler.build,
            discard=self._assembler.discard,
            queue_length_max=staging_depth,
            wait_timeout_s=BUILDER_TIMEOUT_S,
        )
        self._counters = StageCounters()
        self._requests: dict[str, StageRequest] = {}
        self._job_numbers: dict[str, int] = {}
        self._aborted: list[str] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, be it only telling the cache of ended requests."""
        scheduler = self._scheduler
        return scheduler.has_unfinished_requests() or scheduler.has_finished_requests()

    def add(self, request: StageRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never run here, nothing changed."""
        try:
            self._scheduler.add_request(
                Request(
                    request.req_id,
                    request.prompt_token_ids,
                    sampling_params=SamplingParams(max_tokens=request.max_tokens),
                    cache_salt=request.cache_salt,
                    mm_features=request.mm_features,
                )
            )
        except ValueError as error:
            raise RequestError(f"stage {self.config.name!r}: {error}") from error
        self._requests[request.req_id] = request
        self._runner.register(
            request.req_id,
            RequestState(
                token_ids=list(request.prompt_token_ids),
                prefix_seed=prefix_seed(self.config.name, request.cache_salt),
                upstream=request.upstream,
                forced_tokens=request.forced_tokens,
            ),
        )

    def abort(self, req_id: str) -> bool:
        """End a request early: no output of it will be handed over. False if it is not here."""
        if not self._scheduler.abort_request(req_id):
            return False
        del self._requests[req_id]
        self._runner.withdraw(req_id)
        self._aborted.append(req_id)
        self._counters.aborts += 1
        return True

    def step(self) -> tuple[str, ...]:
        """Run one step; the ids of requests that ended with it, for `take_output`."""
        start = time.perf_counter()
        output = self._scheduler.schedule()
        self._check_progress(output)
        self._counters.count_step(output, self._prompt_length)
        self._cache.new_step_starts(self._translator.translate(output))
        executed = self._runner.execute(output)
        step_id = None if executed is None else self._save(executed)
        finished = self._update_scheduler(output, executed)
        job_number = self._builder.submit(self._job(output, executed, step_id, finished))
        for req_id in finished:
            self._job_numbers[req_id] = job_number
            del self._requests[req_id]
        self._counters.engine_seconds += time.perf_counter() - start
        return finished

    def take_output(self, req_id: str) -> StageOutput:
        """The whole output of a finished request, once; waits (bounded) until it is built.

        Raises `RequestError` for a request that has not finished here, or was taken before.
        """
        job_number = self._job_numbers.pop(req_id, None)
        if job_number is None:
            raise RequestError(
                f"stage {self.config.name!r} has no finished output of request {req_id!r}"
            )
        self._builder.wait_done(job_number)
        return self._assembler.take(req_id)

    def report(self) -> StageReport:
        """Counters so far, once the cache has carried out what the run has appended."""
        self._cache.quiesce(BUILDER_TIMEOUT_S)
        return StageReport(
            name=self.config.name,
            encoder_calls=self._runner.encoder_calls,
            cache_stats=self._cache.stats(),
            memory_stats=self._cache.memory_stats(),
            **asdict(self._counters),
        )

    def shutdown(self) -> None:
        """Build what is queued, join the threads, free the host memory; twice is harmless."""
        self._builder.close()
        self._cache.shutdown()

    def _check_progress(self, output: SchedulerOutput) -> None:
        changed = (
            output.total_num_scheduled_tokens,
            output.finished_req_ids,
            output.preempted_req_ids,
        )
        if not any(changed):
            raise EngineError(
                f"stage {self.config.name!r} can schedule none of its requests: "
                f"{list(self._requests)[:8]}"
            )

    def _save(self, executed: ExecutedStep) -> int:
        return self._cache.save_outputs(
            executed.hidden,
            executed.mm_outputs,
            num_tokens_unpadded=executed.num_tokens,
            num_tokens_padded=executed.num_tokens_padded,
            req_ids=tuple(executed.ends),
        )

    def _update_scheduler(
        self, output: SchedulerOutput, executed: ExecutedStep | None
    ) -> tuple[str, ...]:
        """Give the scheduler the sampled tokens; returns the requests that end with this step."""
        sampled = {} if executed is None else executed.sampled
        result = self._scheduler.update_from_output(
            output, {req_id: [token] for req_id, token in sampled.items()}
        )
        return tuple(done.req_id for done in result.finished)

    def _job(
        self,
        output: SchedulerOutput,
        executed: ExecutedStep | None,
        step_id: int | None,
        finished: tuple[str, ...],
    ) -> StepJob:
        aborted, self._aborted = tuple(self._aborted), []
        return StepJob(
            step_id=step_id,
            ends={} if executed is None else executed.ends,
            admitted=tuple(
                (new.req_id, self._requests[new.req_id].num_rows)
                for new in output.scheduled_new_reqs
            ),
            finished=tuple(
                FinishedRequest(
                    req_id,
                    self._requests[req_id].prompt_token_ids,
                    self._runner.decoded_tokens(req_id),
                )
                for req_id in finished
            ),
            aborted=aborted,
        )

    def _prompt_length(self, req_id: str) -> int:
        return len(self._requests[req_id].prompt_token_ids)


def _scheduler_config(config: StageConfig) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_batched_tokens,
        # The null block holds no tokens.
        max_model_len=(config.num_blocks - 1) * config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        reserve_full_isl=config.reserve_full_isl,
    )
