"""The stage-output cache of the published vllm-omni 0.30.0 wheel.

Only its `core/prefix_cache` package is imported; its parent packages are stubbed, so vLLM is not
needed. The wheel is downloaded once, without dependencies, into a cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
import zipfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from workloads import Step

VERSION = "0.30.0"
_PACKAGE = "vllm_omni/core/prefix_cache/"


def load() -> types.ModuleType:
    """The peer's manager module, imported on its own."""
    folder = _unpacked()
    for name, path in (
        ("vllm_omni", folder / "vllm_omni"),
        ("vllm_omni.core", folder / "vllm_omni" / "core"),
    ):
        stub = types.ModuleType(name)
        stub.__path__ = [str(path)]
        sys.modules.setdefault(name, stub)
    return import_module("vllm_omni.core.prefix_cache.manager")


def _unpacked() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slotmirror-peers"
    folder = cache / f"vllm_omni-{VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(cache), f"vllm-omni=={VERSION}"], check=True)
        (wheel,) = cache.glob(f"vllm_omni-{VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(_PACKAGE)]
            archive.extractall(folder, members)
    return folder


@dataclass
class _View:
    """What the peer asks of the runner: the batch, and the slots of a step."""

    block_size: int
    step: Step | None = None

    def batch_req_ids(self) -> list[str]:
        return list(self.step.req_ids) if self.step else []

    def step_slots_cpu(self, req_ids: list[str], num_scheduled: dict[str, int]) -> torch.Tensor:
        return self.step.slots if self.step else torch.empty(0, dtype=torch.int64)


class Peer:
    """Drives the peer with the workload's steps; slots are handed to it, not computed."""

    name = f"vllm-omni {VERSION}"

    def __init__(
        self, num_blocks: int, block_size: int, capacity_tokens: int, deferred: str | None
    ):
        module: Any = load()
        config = module.PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            staging_depth=8,
            staging_capacity_tokens=capacity_tokens,
        )
        self._view = _View(block_size)
        self._cache = module.OmniPrefixCacheManager(config, self._view)
        keys = frozenset() if deferred is None else frozenset({deferred})
        self._cache.register_policy(module.ModelCachePolicy(deferred_keys=keys))

    def prepare(self, step: Step) -> None:
        """Build the step's scheduler output; not timed, it is the engine's own."""
        self._view.step = step
        self._output = SimpleNamespace(
            finished_req_ids=set(step.ended),
            num_scheduled_tokens=dict(zip(step.req_ids, step.counts, strict=True)),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r, num_computed_tokens=computed, block_ids=(list(blocks),))
                for r, computed, blocks in step.new
            ],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set()),
            preempted_req_ids=set(),
        )

    def start(self) -> None:
        """The call before the forward."""
        self._cache.new_step_starts(self._output)

    def save(self, step: Step) -> int:
        """The call after the forward; returns the step id."""
        return self._cache.save_outputs(
            step.hidden, dict(step.mm), num_tokens_unpadded=step.num_tokens,
            num_tokens_padded=step.num_tokens,
        )  # fmt: skip

    def materialize(self, step_id: int, step: Step) -> tuple[dict[str, Any], dict[str, Any]]:
        """The call of the builder."""
        out = self._cache.materialize(step_id, list(step.req_ids))
        return out.hidden_states or {}, out.mm_outputs

    def settle(self) -> None:
        """Nothing to wait for: without CUDA the peer writes inside its calls."""

    def close(self) -> None:
        """Shut the peer down."""
        self._cache.shutdown()
