"""vLLM-Omni 0.30's own cache and the drop-in, side by side; the wheel's mixin over the drop-in."""

from __future__ import annotations

import inspect
import os
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from omni_traffic import BLOCK, BatchView, Step, Traffic

PADDING = 3


def _import_theirs() -> ModuleType:
    """The wheel's cache package, its heavy parents replaced by empty ones."""
    if "vllm_omni.core.prefix_cache" in sys.modules:
        return sys.modules["vllm_omni.core.prefix_cache"]
    wheel = Path(os.environ["SLOTMIRROR_OMNI_WHEEL"])
    for name in ("vllm_omni", "vllm_omni.core", "vllm_omni.utils"):
        module = ModuleType(name)
        module.__path__ = [str(wheel / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.path.insert(0, str(wheel))
    import vllm_omni.core.prefix_cache as theirs

    return theirs


def _outputs(step: Step, number: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """One step's outputs: padded and unpadded rows, deferred rows, leftovers of every kind."""
    n = len(step.rows)
    padded = torch.cat([step.rows, torch.full((PADDING, 3), -1)]).double()
    outputs: dict[str, Any] = {
        "layer_1": padded * 2,
        "codes.audio": step.rows[:, :2].clone(),
        "codes.ref": torch.arange(10.0).reshape(5, 2) + number,
        "meta.list": [torch.ones(2) * number, "text"],
        "meta.nested": {"rows": step.rows * 5, "number": number, "whole": torch.ones(1)},
        "meta.text": f"step {number}",
    }
    if 5 in (n, n + PADDING):  # its first dimension would count this step's tokens by chance
        del outputs["codes.ref"]
    return padded, outputs


def _differences(one: Any, other: Any, where: str) -> list[str]:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{where}: {tuple(one.shape)} / {tuple(other.shape)}"]
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return [f"{where}: {sorted(set(one) ^ set(other))}"]
        return [
            line for key in one for line in _differences(one[key], other[key], f"{where}.{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [line for i, (a, b) in pairs for line in _differences(a, b, f"{where}[{i}]")]
    return [] if one == other else [f"{where}: {one!r} / {other!r}"]


def _drive(module: Any, seed: int, steps: int) -> tuple[list[Any], int]:
    """All outputs of one manager over a trace, and how many tokens of it were hits."""
    view, traffic = BatchView(), Traffic(seed)
    config = module.PrefixCacheConfig(num_blocks=40, block_size=BLOCK)
    manager = module.OmniPrefixCacheManager(config, view)
    manager.register_policy(module.ModelCachePolicy(deferred_keys=frozenset({"codes.audio"})))
    results: list[Any] = []
    hit_tokens = 0
    for number in range(steps):
        step = view.step = traffic.step()
        hit_tokens += sum(r.num_computed_tokens for r in step.output.scheduled_new_reqs)
        manager.new_step_starts(step.output)
        hidden, outputs = _outputs(step, number)
        step_id = manager.save_outputs(
            hidden,
            outputs,
            num_tokens_unpadded=len(step.rows),
            num_tokens_padded=len(step.rows) + PADDING,
        )
        hidden.fill_(-7)  # the next forward overwrites its buffers
        if number % 7 == 3:
            manager.discard_step(step_id)
            continue
        wanted = step.order if number % 5 else step.order[:1]
        results.append(dict(manager.materialize(step_id, wanted)._asdict()))
    manager.shutdown()
    return results, hit_tokens


def omni_side_by_side(_folder: Path) -> dict[str, Any]:
    """Fifteen traces through both caches; every output of every step is compared."""
    theirs = _import_theirs()
    from slotmirror.adapters.vllm_omni.replacements import REPLACEMENTS

    ours = SimpleNamespace(**REPLACEMENTS)
    differences: list[str] = []
    steps = hit_tokens = 0
    for seed in range(15):
        expected, hits = _drive(theirs, seed, 40)
        got, _ = _drive(ours, seed, 40)
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            differences += _differences(one, other, f"seed {seed}, step {number}")
        steps, hit_tokens = steps + len(got), hit_tokens + hits
    return {
        "steps": steps,
        "hit_tokens": hit_tokens,
        "differences": differences[:5],
        "signatures": _signature_differences(theirs, ours),
        "names_missing": [name for name in sorted(theirs.__all__) if not hasattr(ours, name)],
    }


def _signature_differences(theirs: Any, ours: Any) -> list[str]:
    """Functions, constructors and public methods whose parameters are not the same."""
    wrong = []
    for name in (name for name in sorted(theirs.__all__) if hasattr(ours, name)):
        one, other = getattr(theirs, name), getattr(ours, name)
        pairs = {name: (one, other)} if inspect.isfunction(one) else {}
        if inspect.isclass(one):
            members = [m for m in vars(one) if not m.startswith("_") or m == "__init__"]
            pairs = {
                f"{name}.{m}": (getattr(one, m), getattr(other, m, None))
                for m in members
                if inspect.isfunction(getattr(one, m)) or inspect.ismethod(getattr(one, m))
            }
        for label, (a, b) in pairs.items():
            wrapped = "kwargs" in _parameters(a)  # by a decorator that hides its parameters
            if b is None or (not wrapped and list(_parameters(a)) != list(_parameters(b))):
                wrong.append(label)
    return [label for label in wrong if "Error.__init__" not in label]


def _parameters(function: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)


def omni_installed(_folder: Path) -> dict[str, Any]:
    """The wheel's own runner mixin, unchanged, over the installed drop-in; and back again.

    Consumed in the engine's thread, and by a builder thread behind it.
    """
    theirs = _import_theirs()
    import vllm.distributed.parallel_state as parallel_state

    import slotmirror.adapters.vllm_omni as ours

    parallel_state.get_pp_group = lambda: SimpleNamespace(is_last_rank=True)
    original = theirs.OmniPrefixCacheManager
    ours.install()
    ours.install()
    with ThreadPoolExecutor(1) as builder:
        facts = {
            "manager": theirs.OmniPrefixCacheManager.__module__,
            "wrong_rows": _wrong_rows(_runner(theirs), None),
            "wrong_rows_of_builder": _wrong_rows(_runner(theirs), builder),
        }
    ours.uninstall()
    return facts | {"restored": theirs.OmniPrefixCacheManager is original}


def _runner(theirs: Any) -> Any:
    """The mixin alone, configured as its runners do it."""
    from vllm_omni.core.prefix_cache.runner_mixin import PrefixCacheRunnerMixin

    runner: Any = PrefixCacheRunnerMixin()
    runner.is_pooling_model = False
    runner.omni_prefix_cache = None
    runner.kv_cache_config = _kv_cache_config()
    runner._omni_prefix_cache_cfg = theirs.stage_prefix_cache_config(
        kv_cache_config=runner.kv_cache_config,
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, block_size=BLOCK, prefix_match_unit=None
        ),
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, policy="fcfs"),
        model_config=SimpleNamespace(max_model_len=64),
        is_pooling_model=False,
    )
    runner._snapshot_prefix_cache_model_policy(torch.nn.Linear(1, 1))
    return runner


def _wrong_rows(runner: Any, builder: Executor | None) -> int:
    """Rows that differ from the whole prompt's, over one trace."""
    traffic = Traffic(77)
    built: list[Future[tuple[Any, Any]]] = []
    steps: list[Step] = []
    for _ in range(40):
        step = traffic.step()
        runner.input_batch = _input_batch(step)
        runner._prefix_cache_step_begin(step.output)
        runner.omni_prefix_cache._view = BatchView()
        runner.omni_prefix_cache._view.step = step
        step_id = runner._prefix_cache_save_step(
            step.rows.double(),
            {"codes": {"audio": step.rows}},
            num_tokens_unpadded=len(step.rows),
            num_tokens_padded=len(step.rows),
        )
        steps.append(step)
        if builder is None:
            built.append(Future())
            built[-1].set_result(runner._prefix_cache_materialize(step_id, step.order))
        else:
            built.append(builder.submit(runner._prefix_cache_materialize, step_id, step.order))
    wrong = _wrong_outputs(steps, [one.result() for one in built])
    runner.omni_prefix_cache.shutdown()
    return wrong


def _wrong_outputs(steps: list[Step], outputs: list[tuple[Any, Any]]) -> int:
    wrong = 0
    expected: dict[str, list[torch.Tensor]] = {}
    for step, (hidden, mm) in zip(steps, outputs, strict=True):
        for request in step.output.scheduled_new_reqs:
            expected[request.req_id] = []
        for req_id in step.order:
            expected[req_id].append(hidden[req_id])
            wrong += int((mm["codes.audio"][req_id].double() != hidden[req_id]).sum())
            positions = torch.cat(expected[req_id])[:, 1]
            wrong += int((positions != torch.arange(1, len(positions) + 1)).sum())
    return wrong


def _kv_cache_config() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return SimpleNamespace(num_blocks=40, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


class _BlockTables(list):  # type: ignore[type-arg]
    """A runner's block tables, one per group."""

    @property
    def block_tables(self) -> list[Any]:
        return list(self)


def _input_batch(step: Step) -> Any:
    table = SimpleNamespace(
        blocks_per_kv_block=1,
        use_hybrid_blocks=False,
        dcp_world_size=1,
        kv_cache_block_size=BLOCK,
    )
    return SimpleNamespace(
        req_ids=step.order, block_table=_BlockTables([table]), device=torch.device("cpu")
    )
