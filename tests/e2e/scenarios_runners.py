"""Objects of both model runners, made from the wheel's own classes (no V2 engine on a CPU)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_under_test import DELIVERED, collect_on
from omni_traffic import BLOCK, Traffic
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState as StateV2
from vllm.v1.worker.gpu_model_runner import ExecuteModelState as StateV1
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from slotmirror.adapters.delivery.assembly import RequestAssembler
from slotmirror.adapters.delivery.callback_sink import CallbackSink
from slotmirror.adapters.delivery.delivery import Delivery
from slotmirror.adapters.delivery.sink import SinkQueue
from slotmirror.adapters.devices import backend_for
from slotmirror.adapters.vllm.layer_rows import LayerRows
from slotmirror.adapters.vllm.mirror import StageMirror
from slotmirror.adapters.vllm.scheduler_events import SchedulerTranslator
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy

HOOKED = {
    "compile_or_warm_up_model",
    "execute_model",
    "init_device",
    "initialize_from_config",
    "reload_weights",
    "sample_tokens",
    "shutdown",
    "sleep",
    "update_weights",
}
"""Methods of a worker that the mixin stands before."""

READ = {
    CPUWorker: HOOKED,
    GPUWorker: HOOKED,
    NewRequestData: {
        "req_id",
        "prompt_token_ids",
        "prompt_embeds",
        "block_ids",
        "num_computed_tokens",
    },
    CachedRequestData: {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"},
    SchedulerOutput: {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "kv_cache_block_copies",
    },
    ModelRunnerOutput: {"req_ids", "sampled_token_ids"},
    InputBatch: {"req_ids"},
    StateV1: {"hidden_states", "slot_mappings"},
    StateV2: {"hidden_states", "input_batch", "slot_mappings_by_layer"},
}
"""What the adapter reads of each class, or stands before."""


def names_read(_folder: Path) -> dict[str, Any]:
    """Names that a class of the wheel lacks."""
    missing = []
    for owner, names in READ.items():
        known = set(getattr(owner, "_fields", ())) | set(dir(owner))
        if dataclasses.is_dataclass(owner):
            known |= {entry.name for entry in dataclasses.fields(owner)}
        missing += [f"{owner.__name__}.{name}" for name in sorted(names - known)]
    return {"missing": missing}


def both_runners(_folder: Path) -> dict[str, Any]:
    """The same trace through the state objects of V1 and of V2, slots compared in every step."""
    facts: dict[str, Any] = {}
    for version in (1, 2):
        DELIVERED["on"].clear()
        mirror = _mirror()
        prompts: dict[str, int] = {}
        traffic = Traffic(99)
        for _ in range(60):
            step = traffic.step()
            for request in step.output.scheduled_new_reqs:
                prompts[request.req_id] = len(request.prompt_token_ids or ())
            mirror.step_starts(step.output)
            mirror.forward_done(*_state(version, step))
            mirror.sampled(None)
        mirror.shutdown(30.0)
        got = DELIVERED["on"]
        wrong = [
            req_id
            for req_id, rows in got.items()
            if rows.rows["hidden_states"][:, 1].tolist() != list(range(1, prompts[req_id] + 1))
        ]
        facts |= {f"delivered_v{version}": len(got), f"wrong_v{version}": wrong}
    return facts


def _state(version: int, step: Any) -> tuple[Any, Any]:
    """(execute-model state, runner) after the forward of a step, padded by two rows."""
    counts = step.output.num_scheduled_tokens
    slots = [
        step.tables[r][p // BLOCK] * BLOCK + p % BLOCK
        for r in step.order
        for p in range(step.first[r], step.first[r] + counts[r])
    ]
    layers = {"model.layers.0": torch.tensor([*slots, -1, -1])}
    hidden = torch.cat([step.rows, torch.full((2, 3), -1)]).double()
    if version == 1:
        empty = dict.fromkeys(StateV1._fields)
        state: Any = StateV1(**empty | {"hidden_states": hidden, "slot_mappings": layers})
        return state, SimpleNamespace(input_batch=SimpleNamespace(req_ids=step.order))
    batch = InputBatch.__new__(InputBatch)
    batch.req_ids = list(step.order)
    values = {"hidden_states": hidden, "input_batch": batch, "slot_mappings_by_layer": layers}
    return StateV2(**dict.fromkeys(StateV2._fields) | values), SimpleNamespace()


def _mirror() -> StageMirror:
    config = PrefixCacheConfig(num_blocks=40, block_size=BLOCK, staging_capacity_tokens=64)
    cache = PrefixCacheManager(config, backend_for(torch.device("cpu")))
    cache.register_policy(ModelCachePolicy())
    queue = SinkQueue(
        CallbackSink(collect_on),
        bytes_max=1 << 20,
        when_full="block",
        wait_s=30.0,
        name="slotmirror-s",
    )
    assembler = RequestAssembler(prompt_only=True)
    delivery = Delivery(cache, assembler, queue, name="slotmirror-d")
    translator = SchedulerTranslator(num_blocks=40, block_size=BLOCK)
    layers = LayerRows(torch.nn.Module(), ())
    return StageMirror(cache, translator, delivery, layers, debug_slots=True)
