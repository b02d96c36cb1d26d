"""The real vLLM, 0.25.1 or 0.32.0: its own classes, driven without a model or weights."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The runs choose their own arrival times and answers; nothing is downloaded or reported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import msgspec
import torch
import vllm
import vllm.envs as envs
from vllm.distributed.kv_events import KVEventBatch
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kv.plans import Group, ManagerPlan, RequestPlan, SchedulerPlan, Scope, own_object

VERSION: str = vllm.__version__
IS_0_25 = VERSION.startswith("0.25.")
# Since 0.25.1: sliding windows give blocks back a step later and register others; an encoder
# output evicted and encoded again in one step is not reported; stop tokens end a request before
# min_tokens; a request alone may exceed the long-prefill threshold.
SCOPE = (
    Scope()
    if IS_0_25
    else Scope(windows=False, encoder=False, min_tokens=False, long_prefill_token_threshold=False)
)
RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED

logging.getLogger("vllm").setLevel(logging.ERROR)
register_all_kvcache_specs(None)

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 20,
    "vocab_size": 256,
}


def block_hasher(plan: ManagerPlan) -> Any:
    """The request hasher of an engine process with this algorithm, None with caching off."""
    if not plan.enable_caching:
        return None
    function = get_hash_fn_by_name(plan.algo)
    kv_cache_utils.init_none_hash(function)
    return kv_cache_utils.get_request_block_hasher(plan.hash_block_size, function)


def manager(plan: ManagerPlan, *, events: bool = True) -> KVCacheManager:
    """A manager as the engine makes it."""
    config = _kv_cache_config(plan)
    parameters = inspect.signature(KVCacheManager.__init__).parameters
    batched = next(n for n in ("max_num_batched_tokens", "max_in_flight_tokens") if n in parameters)
    return KVCacheManager(
        config,
        plan.max_model_len,
        scheduler_block_size=plan.scheduler_block_size,
        hash_block_size=plan.hash_block_size,
        enable_caching=plan.enable_caching,
        use_eagle=plan.use_eagle,
        log_stats=True,
        enable_kv_cache_events=events,
        watermark=plan.watermark,
        **{batched: plan.max_batched_tokens},
    )


def request(plan: RequestPlan, hasher: Any) -> Request:
    """The request, its features as the front end hands them over."""
    lora = LoRARequest(own_object(plan.lora), 1, f"/adapters/{plan.lora}") if plan.lora else None
    return Request(
        plan.req_id,
        list(plan.tokens),
        SamplingParams(
            max_tokens=plan.max_tokens,
            min_tokens=plan.min_tokens,
            stop_token_ids=list(plan.stop_token_ids) or None,
            skip_reading_prefix_cache=plan.skip_reading,
        ),
        None,
        mm_features=[_feature(*feature) for feature in plan.features],
        lora_request=lora,
        cache_salt=own_object(plan.salt),
        priority=plan.priority,
        arrival_time=plan.arrival_time,
        block_hasher=hasher,
    )


def lookup(manager: KVCacheManager, request: Request) -> tuple[Any, int]:
    """Hit blocks and hit tokens."""
    blocks, num_hits, *_ = manager.get_computed_blocks(request)
    return blocks, num_hits


def tables(blocks: Any) -> list[list[int]] | None:
    """Block ids per group."""
    return None if blocks is None else [list(ids) for ids in blocks.get_block_ids()]


def table(manager: KVCacheManager, req_id: str) -> list[list[int]]:
    return [list(ids) for ids in manager.get_block_ids(req_id)]


def free_queue(manager: KVCacheManager) -> list[int]:
    queue = manager.block_pool.free_block_queue
    return [block.block_id for block in queue.get_all_free_blocks()]


def num_cached_keys(manager: KVCacheManager) -> int:
    return len(manager.block_pool.cached_block_hash_to_block)


def event_bytes(events: Sequence[Any]) -> bytes:
    """The events as they go over the wire."""
    return msgspec.msgpack.encode(KVEventBatch(0.0, list(events), 0))


class _NoGrammar:
    """A structured-output manager without requests of its kind."""

    def should_advance(self, request: Request) -> bool:
        return False

    def accept_tokens(self, *arguments: object) -> bool:
        return True

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        return tokens


class PeerScheduler:
    """A scheduler whose events are kept instead of published."""

    def __init__(self, plan: SchedulerPlan, hasher: Any) -> None:
        self._hasher = hasher
        self._published: list[Any] = []
        kv = plan.manager
        self.scheduler = scheduler = Scheduler(
            _vllm_config(plan),
            _kv_cache_config(kv),
            _NoGrammar(),
            block_size=kv.scheduler_block_size,
            hash_block_size=kv.hash_block_size,
            log_stats=True,
        )
        scheduler.kv_cache_manager = manager(kv)
        scheduler.kv_event_publisher = SimpleNamespace(
            publish=lambda batch: self._published.extend(batch.events)
        )
        scheduler.max_num_encoder_input_tokens = plan.encoder_budget
        scheduler.encoder_cache_manager = EncoderCacheManager(plan.encoder_cache_size)
        scheduler.num_spec_tokens = plan.num_drafts
        # Without this, new decodes are padded to the number of draft tokens.
        scheduler.dynamic_sd_lookup = [plan.num_drafts] * 100
        if kv.use_eagle:
            scheduler.use_eagle = scheduler.use_eagle_block_drop = True
            scheduler.num_lookahead_tokens = plan.num_drafts

    def add(self, plan: RequestPlan) -> None:
        self.scheduler.add_request(request(plan, self._hasher))

    def abort(self, req_id: str) -> None:
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def update(self, output: Any, sampled: Mapping[str, list[int]]) -> tuple[list[Any], Any]:
        """(outputs of the step, statistics of the step)."""
        ids = list(output.num_scheduled_tokens)
        by_client = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
                sampled_token_ids=[list(sampled.get(req_id, ())) for req_id in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        outputs = [
            (out.request_id, list(out.new_token_ids), None if out.finish_reason is None
             else str(out.finish_reason))
            for client in by_client.values()
            for out in client.outputs
        ]  # fmt: skip
        stats = [client.scheduler_stats for client in by_client.values() if client.scheduler_stats]
        return outputs, stats[0].prefix_cache_stats if stats else None

    def take_event_bytes(self) -> bytes:
        events, self._published = self._published, []
        return event_bytes(events)

    def set_drafts(self, drafts: Mapping[str, list[int]]) -> None:
        ids = list(drafts)
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [list(drafts[i]) for i in ids]))


def _feature(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=own_object(identifier),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def _kv_cache_config(plan: ManagerPlan) -> KVCacheConfig:
    """The groups of the plan; sets what vLLM reads from its environment instead."""
    envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = plan.int_hashes
    if IS_0_25:
        envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL = plan.retention_interval
    config = KVCacheConfig(
        num_blocks=plan.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}"], _spec(group)) for i, group in enumerate(plan.groups)
        ],
    )
    if not IS_0_25:
        config.prefix_cache_retention_interval = plan.retention_interval
    return config


def _spec(group: Group) -> Any:
    size, window = group
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if window is None:
        return FullAttentionSpec(**shape)
    return SlidingWindowSpec(**shape, sliding_window=window)


@cache
def _base_config() -> Any:
    """Settings of a tiny model, of which only its description exists."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            async_scheduling=False,
        )
        return arguments.create_engine_config()


def _vllm_config(plan: SchedulerPlan) -> Any:
    """A copy of the base settings with this plan's."""
    kv, config = plan.manager, copy.copy(_base_config())
    values = {
        "scheduler_config": {
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": kv.max_batched_tokens,
            "policy": plan.policy,
            "watermark": kv.watermark,
            "scheduler_reserve_full_isl": plan.reserve_full_isl,
            "long_prefill_token_threshold": plan.long_prefill_token_threshold,
        },
        "cache_config": {
            "num_gpu_blocks": kv.num_blocks,
            "enable_prefix_caching": kv.enable_caching,
            "block_size": kv.scheduler_block_size,
        },
        "model_config": {"max_model_len": kv.max_model_len},
    }
    for part, settings in values.items():
        changed = copy.copy(getattr(config, part))
        for name, value in settings.items():
            object.__setattr__(changed, name, value)
        object.__setattr__(config, part, changed)
    return config
