"""What a replay runs with."""

from dataclasses import dataclass, field

from slotmirror.engine.pipeline_types import CommitterKind, ModelKind, PipelineConfig
from slotmirror.engine.traces import ReadOptions

DEFAULT_NUM_BLOCKS = 4096
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay with.

    Attributes:
        model: kind of both stages' model.
        backend: name of the device backend; None chooses automatically.
        num_blocks: KV blocks per stage, the null block included.
        block_size: slots per block.
        max_batched_tokens: tokens per step and stage.
        reserve_full_sequence: start a request only when its whole prompt fits; off, a small KV
            cache preempts far more.
        defer_codes: write the talker's codes when their request ends, not with every step.
        committer: where the stage-output cache moves rows.
        verify: check every row: the fingerprint model against its formula, byte for byte; the
            transformer against a run with caching off, within its tolerance.
        compare: time the same trace with caching off, whether verification needs it or not.
        read: which requests of the file, and how long they are.
    """

    model: ModelKind = "transformer"
    backend: str | None = None
    num_blocks: int = DEFAULT_NUM_BLOCKS
    block_size: int = DEFAULT_BLOCK_SIZE
    max_batched_tokens: int = 512
    reserve_full_sequence: bool = True
    defer_codes: bool = True
    committer: CommitterKind = "threaded"
    verify: bool = True
    compare: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)

    @property
    def verifies_by_reference(self) -> bool:
        """Whether verification needs the outputs of a run with caching off."""
        return self.verify and self.model == "transformer"

    def pipeline_config(self, backend: str) -> PipelineConfig:
        """The pipeline's settings on this backend, checked.

        Raises:
            RequestError: a setting is out of range.
        """
        return PipelineConfig(
            model=self.model,
            backend=backend,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_batched_tokens=self.max_batched_tokens,
            reserve_full_isl=self.reserve_full_sequence,
            defer_codes=self.defer_codes,
            committer=self.committer,
        )
