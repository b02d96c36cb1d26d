"""Several ranks, in processes of their own: rows are kept once, in files (G3)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from engine_under_test import DELIVERED, EngineUnderTest, compare_prompts, keys_of_all, sampling
from tiny_model import Reference, Tokens

from slotmirror.adapters.delivery.file_sink import read_rows, request_files


def _two_ranks(
    folder: Path, layers: list[int], executor: str = "mp", **parallel: Any
) -> dict[str, Any]:
    rows = Path(tempfile.mkdtemp(dir=folder))
    sink = {"sink": "files", "folder": str(rows), "layers": layers}
    engine = EngineUnderTest(
        folder, slotmirror=sink, distributed_executor_backend=executor, **parallel
    )
    # vLLM 0.32 makes the buffers between pipeline ranks at warm-up, which an eager CPU engine
    # skips; a dummy batch makes them too, and must reach neither cache nor sink (C4).
    engine.llm.collective_rpc("execute_dummy_batch")
    tokens = Tokens(21)
    prefix = tokens.sequence(96)
    for _ in range(2):
        engine.generate([prefix + tokens.sequence(30) for _ in range(12)], sampling(3))
    engine.llm.collective_rpc("slotmirror_flush")
    stats = engine.llm.collective_rpc("slotmirror_stats")
    DELIVERED["on"].update((r.req_id, r) for r in map(read_rows, request_files(rows)))
    worst = compare_prompts(engine, Reference(folder, torch.float32))
    engine.shut_down()
    kept = [rank for rank, one in enumerate(stats) if one is not None]
    return {
        "requests": len(engine.outputs),
        "worst": worst,
        "keys": keys_of_all(engine),
        "kept_on": kept,
        "not_whole": [path.name for path in rows.iterdir() if path.suffix != ".safetensors"],
        "stats": stats[kept[0]],
    }


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """Two tensor-parallel ranks."""
    return _two_ranks(folder, [0], tensor_parallel_size=2)


def pipeline_parallel(folder: Path) -> dict[str, Any]:
    """Two pipeline ranks."""
    return _two_ranks(folder, [], pipeline_parallel_size=2)


def tensor_parallel_on_ray(folder: Path) -> dict[str, Any]:
    """Two tensor-parallel ranks as Ray actors.

    vLLM's CPU platform says that it does not support Ray, and all that it lacks is the name of a
    device: it gets the one of devices that Ray believes to have.
    """
    import ray

    ray.init(
        num_gpus=2, include_dashboard=False, runtime_env={"worker_process_setup_hook": name_devices}
    )
    name_devices()
    try:
        return _two_ranks(folder, [0], executor="ray", tensor_parallel_size=2)
    finally:
        ray.shutdown()


def name_devices() -> None:
    """In the engine's process and in every actor's, before vLLM asks."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"
