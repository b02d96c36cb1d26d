"""Settings, requests and results of the two-stage pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from slotmirror.engine.errors import RequestError
from slotmirror.engine.models.base import VOCAB_SIZE
from slotmirror.engine.stage_output import StageOutput
from slotmirror.kvcache.request_params import MultimodalFeature

ModelKind: TypeAlias = Literal["transformer", "fingerprint"]
CommitterKind: TypeAlias = Literal["threaded", "inline"]

THINKER = "thinker"
TALKER = "talker"
STAGES = (THINKER, TALKER)


@dataclass(frozen=True, slots=True)
class StageOverrides:
    """Settings of one stage that differ from the pipeline's; None takes the pipeline's."""

    enable_prefix_caching: bool | None = None
    num_blocks: int | None = None
    max_batched_tokens: int | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class StageConfig:
    """The settings of one stage, resolved."""

    name: str
    enable_prefix_caching: bool
    num_blocks: int
    block_size: int
    max_batched_tokens: int
    max_num_seqs: int
    reserve_full_isl: bool


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Settings of the pipeline; checked when it is made.

    model                  both stages' kind of model
    backend                name of the device backend; None: automatic choice
    num_blocks             KV blocks per stage, the null block included
    block_size             slots per block
    max_batched_tokens     tokens per step and stage
    max_num_seqs           requests that run at once, per stage
    enable_prefix_caching  for both stages, overridable per stage
    reserve_full_isl       start a request only when its whole prompt fits, not just its first
                           chunk; off, a small KV cache preempts far more
    defer_codes            write the talker's codes when their request ends, not with every step
    committer              where the stage-output cache moves rows: "threaded" or "inline"
    staging_depth          pages of the stage-output cache: saved steps not yet built
    handover_lag_steps     rounds after which a finished request is taken from its builder; a
                           fixed lag keeps schedules reproducible while builders run beside them
    seed                   of the models' weights
    """

    model: ModelKind = "transformer"
    backend: str | None = "cpu_ref"
    num_blocks: int = 2048
    block_size: int = 16
    max_batched_tokens: int = 512
    max_num_seqs: int = 32
    enable_prefix_caching: bool = True
    reserve_full_isl: bool = True
    thinker: StageOverrides = field(default_factory=StageOverrides)
    talker: StageOverrides = field(default_factory=StageOverrides)
    defer_codes: bool = True
    committer: CommitterKind = "threaded"
    staging_depth: int = 4
    handover_lag_steps: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in ("transformer", "fingerprint"):
            raise RequestError(f'model={self.model!r}: must be "transformer" or "fingerprint"')
        if self.handover_lag_steps < 0:
            raise RequestError(f"handover_lag_steps={self.handover_lag_steps}: must be >= 0")
        for stage in STAGES:
            _check_sizes(self.stage(stage))

    def stage(self, name: str) -> StageConfig:
        """The resolved settings of stage `name`."""
        overrides = self.thinker if name == THINKER else self.talker

        def pick(field_name: str) -> int:
            own: int | None = getattr(overrides, field_name)
            common: int = getattr(self, field_name)
            return common if own is None else own

        return StageConfig(
            name=name,
            enable_prefix_caching=bool(pick("enable_prefix_caching")),
            num_blocks=pick("num_blocks"),
            block_size=self.block_size,
            max_batched_tokens=pick("max_batched_tokens"),
            max_num_seqs=pick("max_num_seqs"),
            reserve_full_isl=self.reserve_full_isl,
        )

    def caching_off(self) -> "PipelineConfig":
        """The same pipeline with prefix caching off in both stages: the reference run."""
        return replace(
            self,
            enable_prefix_caching=False,
            thinker=replace(self.thinker, enable_prefix_caching=False),
            talker=replace(self.talker, enable_prefix_caching=False),
        )


def _check_sizes(stage: StageConfig) -> None:
    least = {"num_blocks": 2, "block_size": 1, "max_batched_tokens": 1, "max_num_seqs": 1}
    for name, minimum in least.items():
        value = getattr(stage, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise RequestError(
                f"{name}={value!r} of stage {stage.name!r}: must be a whole number >= {minimum}"
            )


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """One prompt for the pipeline.

    token_ids    the thinker's prompt, 0 <= id < VOCAB_SIZE
    max_tokens   tokens the thinker decodes; max_frames: frames the talker decodes
    mm_features  multimodal items over placeholder tokens of the prompt
    cache_salt   only requests of equal salt share blocks
    after        id of a request that must have left the pipeline before (the former turn)
    """

    req_id: str
    token_ids: Sequence[int]
    max_tokens: int = 16
    max_frames: int = 4
    mm_features: tuple[MultimodalFeature, ...] = ()
    cache_salt: str | None = None
    after: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        for name in ("max_tokens", "max_frames"):
            if getattr(self, name) < 1:
                raise RequestError(f"request {self.req_id!r}: {name} must be >= 1")
        if not self.token_ids:
            raise RequestError(f"request {self.req_id!r} has an empty prompt")
        lowest, highest = min(self.token_ids), max(self.token_ids)
        if lowest < 0 or highest >= VOCAB_SIZE:
            bad = lowest if lowest < 0 else highest
            raise RequestError(
                f"request {self.req_id!r}: token id {bad} is outside the vocabulary 0 .. "
                f"{VOCAB_SIZE - 1}"
            )

    def num_rows(self, stage: str) -> int:
        """Positions that `stage` computes: the last decoded token is never an input."""
        decoded = self.max_tokens if stage == THINKER else self.max_frames
        return len(self.token_ids) + decoded - 1

    def stage_salt(self, stage: str) -> str | None:
        """The cache salt under which `stage` keeps this request's blocks.

        The talker's prompt repeats the thinker's token ids, and its rows follow from the
        thinker's, so its salt names the stage and whatever else they follow from.
        """
        if stage == THINKER:
            return self.cache_salt
        images = (f"{f.identifier}@{f.offset}+{f.length}" for f in self.mm_features)
        return "/".join((TALKER, self.cache_salt or "", *images))


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """Everything both stages delivered for one request."""

    req_id: str
    request: PipelineRequest
    thinker: StageOutput
    talker: StageOutput

    def stage(self, name: str) -> StageOutput:
        """What the stage of this name delivered."""
        return self.thinker if name == THINKER else self.talker


@dataclass(frozen=True, slots=True)
class StageReport:
    """Counters of one stage over one pipeline's life.

    hit_tokens                prompt tokens served from the cache at a request's first admission
    resumed_hit_tokens        the same when a preempted request came back
    prefill_tokens_computed   prompt tokens computed, recomputation after preemptions included
    decode_tokens             computed positions behind the prompt
    engine_seconds            time in this stage's steps on the engine thread
    """

    name: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    resumed_hit_tokens: int
    prefill_tokens_computed: int
    decode_tokens: int
    preemptions: int
    aborts: int
    steps: int
    engine_seconds: float
    encoder_calls: int
    cache_stats: Mapping[str, object]
    memory_stats: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What one `Pipeline.run` did; `outputs` is empty when they were streamed."""

    wall_seconds: float
    stages: Mapping[str, StageReport]
    outputs: Mapping[str, PipelineOutput]
