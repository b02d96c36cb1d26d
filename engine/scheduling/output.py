"""What one step asks of the worker, and what it brought (spec kv 6).

The worker keeps its own block tables from these alone: new requests set them, running ones
append, resumed ones replace, finished and preempted ones drop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.events import KVCacheEvent
from slotmirror.kvcache.request import (
    FinishReason,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    Request,
    SamplingParams,
)
from slotmirror.kvcache.residency import ResidencySample
from slotmirror.kvcache.stats import PrefixCacheStats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NewRequestData:
    """A request the worker does not know yet. `block_ids` is its whole table per group, hits
    included; the first `num_computed_tokens` tokens are in those blocks already.

    `prefill_token_ids` (prompt and outputs so far) is set only with `resumed_as_new`.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: Sequence[MultimodalFeature]
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    block_ids: BlockIds
    num_computed_tokens: int
    lora_request: LoRARequest | None
    prompt_embeds: "torch.Tensor | None" = None
    prompt_is_token_ids: Sequence[bool] | None = None
    prefill_token_ids: list[int] | None = None

    @classmethod
    def from_request(
        cls, request: Request, block_ids: BlockIds, *, with_prefill_tokens: bool
    ) -> "NewRequestData":
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            lora_request=request.lora_request,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            prefill_token_ids=request.all_token_ids.copy() if with_prefill_tokens else None,
        )


@dataclass
class CachedRequestData:
    """Requests the worker knows, running ones first, then resumed ones; lists run in parallel.

    `new_block_ids` is None if there are none; it is appended to the table, except for
    `resumed_req_ids`, whose tables it replaces. `all_token_ids` only holds requests that the
    previous step did not schedule.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens` is in batch order; computed counts are those before it.

    `finished_req_ids` ended since the previous step, `preempted_req_ids` lost their blocks since
    then; a worker must drop both before it reads this step's tables, because their blocks may
    already be in them.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    free_encoder_mm_hashes: list[str]


@dataclass(frozen=True)
class RequestOutput:
    """New tokens of one request in one step; with a `finish_reason` they are its last."""

    req_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class SchedulerStats:
    """State after a step, and what happened since the last `make_stats`."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats
    num_preemptions: int
    eviction_samples: list[ResidencySample] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """What `Scheduler.update_from_output` made of a step's sampled tokens."""

    outputs: list[RequestOutput]
    events: list[KVCacheEvent]

    @property
    def finished(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output.finish_reason is not None]
