"""Ours, built from the same plans and seen in the same notation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotmirror.engine.golden_replay.recording import RecordingManager
from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.kvcache.block_hashing import make_block_hasher
from slotmirror.kvcache.event_stream.wire import KVEventBatch, encode_batch
from slotmirror.kvcache.events import BlockStored, KVCacheEvent, KVEventLog
from slotmirror.kvcache.hash_functions import KeyFormat
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import (
    LoRARequest,
    MultimodalFeature,
    Request,
    RequestStatus,
    SamplingParams,
)
from slotmirror.kvcache.specs import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm_kv.plans import Group, ManagerPlan, RequestPlan, SchedulerPlan, own_object

RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED

logging.getLogger("slotmirror").setLevel(logging.ERROR)


class Ours:
    """Our side in one key format."""

    def __init__(self, key_format: KeyFormat) -> None:
        self.key_format = key_format

    def block_hasher(self, plan: ManagerPlan) -> Any:
        """The request hasher of an engine process, None with caching off."""
        if not plan.enable_caching:
            return None
        return make_block_hasher(plan.hash_block_size, plan.algo, self.key_format)

    def manager(self, plan: ManagerPlan, *, events: bool = True) -> KVCacheManager:
        """A manager as the scheduler makes it."""
        log = KVEventLog(self.key_format, use_int_block_hashes=plan.int_hashes)
        return KVCacheManager(
            KVCacheConfig(plan.num_blocks, groups(plan)),
            plan.max_model_len,
            max_num_batched_tokens=plan.max_batched_tokens,
            hash_block_size=plan.hash_block_size if plan.enable_caching else None,
            enable_caching=plan.enable_caching,
            use_eagle=plan.use_eagle,
            watermark=plan.watermark,
            retention_interval=plan.retention_interval,
            events=log if events else None,
        )

    def event_bytes(self, events: Sequence[KVCacheEvent]) -> bytes:
        """The events as they go over the wire; 0.32 publishes extra keys without their tags."""
        if self.key_format is KeyFormat.TAGGED:
            events = [_untagged(event) for event in events]
        return encode_batch(KVEventBatch(0.0, events, 0))


class LookupCountingManager(RecordingManager):
    """The recorder, with the events of the plan instead of its own."""

    def __init__(self, config: KVCacheConfig, max_model_len: int, **options: Any) -> None:
        events = options["events"]
        super().__init__(config, max_model_len, **options)
        self._events = events
        self.pool._events = events
        for manager in self.coordinator.managers:
            manager._events = events


def groups(plan: ManagerPlan) -> tuple[KVCacheGroupSpec, ...]:
    return tuple(KVCacheGroupSpec(_spec(group)) for group in plan.groups)


def request(plan: RequestPlan, hasher: Any) -> Request:
    return Request(
        plan.req_id,
        list(plan.tokens),
        sampling_params=SamplingParams(
            max_tokens=plan.max_tokens,
            min_tokens=plan.min_tokens,
            stop_token_ids=frozenset(plan.stop_token_ids),
            skip_reading_prefix_cache=plan.skip_reading,
        ),
        mm_features=[
            MultimodalFeature(str(own_object(name)), offset, length)
            for name, offset, length in plan.features
        ],
        lora_request=LoRARequest(str(own_object(plan.lora)), f"/adapters/{plan.lora}", 1)
        if plan.lora
        else None,
        cache_salt=own_object(plan.salt),
        priority=plan.priority,
        arrival_time=plan.arrival_time,
        block_hasher=hasher,
    )


class PlannedPreemptionError(Exception):
    """A request was preempted in its own step: there the defect X1 makes the sides differ."""


class OurScheduler:
    """A scheduler whose preemptions within a step end the comparison (X1)."""

    def __init__(self, plan: SchedulerPlan, side: Ours, hasher: Any) -> None:
        kv = plan.manager
        self._side, self._hasher = side, hasher
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=kv.num_blocks,
                block_size=kv.groups[0][0],
                max_num_seqs=plan.max_num_seqs,
                max_num_batched_tokens=kv.max_batched_tokens,
                max_model_len=kv.max_model_len,
                enable_prefix_caching=kv.enable_caching,
                key_format=side.key_format,
                policy=plan.policy,
                watermark=kv.watermark,
                reserve_full_isl=plan.reserve_full_isl,
                long_prefill_token_threshold=plan.long_prefill_token_threshold,
                encoder_budget=plan.encoder_budget,
                encoder_cache_size=plan.encoder_cache_size,
                use_eagle=kv.use_eagle,
                num_speculative_tokens=plan.num_drafts,
                enable_kv_cache_events=True,
                use_int_block_hashes=kv.int_hashes,
            ),
            groups(kv),
            manager_type=LookupCountingManager,
        )
        self.manager: RecordingManager = self.scheduler.kv_cache_manager  # type: ignore[assignment]
        self.manager.drop_unwritten_hashes = self._preempted_in_its_step  # type: ignore[method-assign]
        self._events: list[KVCacheEvent] = []

    def add(self, plan: RequestPlan) -> bool:
        """False for a request that can never run: vLLM would let it wait for ever."""
        try:
            self.scheduler.add_request(request(plan, self._hasher))
        except ValueError:
            return False
        return True

    def update(self, output: Any, sampled: Mapping[str, list[int]]) -> list[Any]:
        result = self.scheduler.update_from_output(output, sampled)
        self._events += result.events
        return [
            (out.req_id, out.new_token_ids, None if out.finish_reason is None
             else str(out.finish_reason))
            for out in result.outputs
        ]  # fmt: skip

    def take_event_bytes(self) -> bytes:
        events, self._events = self._events, []
        return self._side.event_bytes(events)

    def _preempted_in_its_step(self, request: Request) -> None:
        raise PlannedPreemptionError(request.request_id)


def _spec(group: Group) -> AttentionSpec:
    size, window = group
    if window is None:
        return FullAttentionSpec(size)
    return SlidingWindowSpec(size, sliding_window=window)


def _untagged(event: KVCacheEvent) -> KVCacheEvent:
    if not isinstance(event, BlockStored) or event.extra_keys is None:
        return event
    keys = [keys and tuple(_without_tag(key) for key in keys) for keys in event.extra_keys]
    return replace(event, extra_keys=keys)


def _without_tag(key: Any) -> Any:
    kind, *values = key
    return tuple(values) if kind == "mm" else values[0]
