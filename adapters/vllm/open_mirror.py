"""Builds a worker's mirror when its KV cache is sized: settings, gate, cache, sink."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slotmirror.adapters.delivery.assembly import RequestAssembler
from slotmirror.adapters.delivery.callback_sink import CallbackSink, callback_named
from slotmirror.adapters.delivery.delivery import Delivery
from slotmirror.adapters.delivery.file_sink import FileSink
from slotmirror.adapters.delivery.shared_memory import SharedMemorySink
from slotmirror.adapters.delivery.sink import Sink, SinkQueue
from slotmirror.adapters.devices import backend_for
from slotmirror.adapters.gate import StageFacts, StageKind, stage_prefix_cache_config
from slotmirror.adapters.vllm.layer_rows import LayerRows
from slotmirror.adapters.vllm.mirror import StageCache, StageMirror
from slotmirror.adapters.vllm.scheduler_events import SchedulerTranslator
from slotmirror.adapters.vllm.settings import AdapterSettings
from slotmirror.adapters.vllm.stage_facts import refuse_without_cache, stage_facts
from slotmirror.adapters.vllm.step_rows_source import StepRowsForTwoThreads
from slotmirror.core.errors import ConfigError
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy

_LOG = logging.getLogger(__name__)


def open_mirror(
    settings: AdapterSettings, vllm_config: Any, kv_cache_config: Any, runner: Any
) -> StageMirror | None:
    """The mirror of this worker, or None for a stage without rows of its own (pooling, G1).

    Raises `PrefixCacheUnmatchError` and `ConfigError`, naming the setting; nothing is left open.
    """
    facts = stage_facts(
        vllm_config,
        kv_cache_config,
        kernel_block_size=_kernel_block_size(runner),
        cache_settings=settings.cache,
    )
    if facts.kind is StageKind.POOLING:
        _LOG.info("slotmirror: a pooling stage has no per-token outputs to keep")
        return None
    cache = _cache(settings, facts, runner)
    layers = LayerRows(runner.get_model(), _checked_layers(settings, vllm_config))
    name = replica_name(vllm_config.parallel_config)
    try:
        delivery = _delivery(settings, cache, name)
    except BaseException:
        layers.remove()
        cache.shutdown()
        raise
    translator = SchedulerTranslator(num_blocks=facts.num_blocks, block_size=facts.block_size)
    return StageMirror(cache, translator, delivery, layers, debug_slots=settings.debug_slots)


def _cache(settings: AdapterSettings, facts: StageFacts, runner: Any) -> StageCache:
    config = stage_prefix_cache_config(facts)
    policy = ModelCachePolicy.from_model(runner.get_model())
    if config is None:
        refuse_without_cache(facts)
        return StepRowsForTwoThreads(policy)
    manager = PrefixCacheManager(config, backend_for(runner.device, settings.backend))
    manager.register_policy(policy)
    return manager


def _delivery(settings: AdapterSettings, cache: StageCache, name: str) -> Delivery:
    queue = SinkQueue(
        make_sink(settings, name),
        bytes_max=settings.queue_bytes_max,
        when_full=settings.when_full,
        wait_s=settings.block_timeout_s,
        name=f"slotmirror-sink-{name}",
    )
    assembler = RequestAssembler(prompt_only=settings.deliver == "prompt")
    return Delivery(cache, assembler, queue, name=f"slotmirror-delivery-{name}")


def replica_name(parallel_config: Any) -> str:
    """`dpK` for the K-th data-parallel replica of a deployment.

    By its index: replicas of a dense model all believe that they are alone and have rank 0.
    """
    for attribute in ("data_parallel_index", "data_parallel_rank"):
        number = getattr(parallel_config, attribute, None)
        if number is not None:
            return f"dp{number}"
    return "dp0"


def make_sink(settings: AdapterSettings, replica: str) -> Sink:
    """The configured sink. `replica` tells apart the data-parallel replicas of one deployment."""
    if settings.sink == "files":
        return FileSink(Path(str(settings.folder)), prefix=f"{replica}-")
    if settings.sink == "shared_memory":
        name = f"{settings.name}-{replica}"
        return SharedMemorySink(name, bytes_max=settings.shared_memory_bytes_max)
    return CallbackSink(callback_named(settings.callback))


def _kernel_block_size(runner: Any) -> int | None:
    """Of the one KV group: V1 keeps it private, V2 does not; None where neither is there."""
    for name in ("_kernel_block_sizes", "kernel_block_sizes"):
        sizes = getattr(runner, name, None)
        if sizes:
            return int(sizes[0])
    return None


def _checked_layers(settings: AdapterSettings, vllm_config: Any) -> tuple[int, ...]:
    """Hooks of a compiled or captured model do not run."""
    if settings.layers and not getattr(vllm_config.model_config, "enforce_eager", False):
        raise ConfigError(
            "layers",
            settings.layers,
            "hooks do not run in compiled models and captured graphs: set enforce_eager=True",
        )
    if settings.layers and vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "layers", settings.layers, "are not all on the last pipeline rank, which keeps rows"
        )
    return settings.layers
