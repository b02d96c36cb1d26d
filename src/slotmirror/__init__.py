"""slotmirror: one host row per KV slot for every per-token output of a pipeline stage.

An LLM engine with prefix caching computes only the tail of a prompt whose beginning it knows.
slotmirror keeps what the next pipeline stage needs of that beginning, and hands out the whole.

Public names are resolved when they are first used: importing the package imports no torch, so that
`slotmirror backends` can answer on a machine whose torch or vendor runtime does not load.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from slotmirror.adapters.block_tables import BlockTables
    from slotmirror.adapters.gate import StageFacts, StageKind, stage_prefix_cache_config
    from slotmirror.adapters.stand_in import StepRowsOnly
    from slotmirror.core.backend import Capabilities, DeviceBackend, Fence, HostBuffer, Probe
    from slotmirror.core.config import PrefixCacheConfig
    from slotmirror.core.errors import PrefixCacheError
    from slotmirror.core.events import AdmittedRequest, StepEvents
    from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
    from slotmirror.core.manager import PrefixCacheManager
    from slotmirror.core.memory_plan import MemoryPlan, plan_memory
    from slotmirror.core.merge import StageOutputs
    from slotmirror.core.policy import ModelCachePolicy
    from slotmirror.core.registry import list_backends, load_backend, report_backends

__version__ = "0.1.0"

__all__ = [
    "HIDDEN_KEY",
    "AdmittedRequest",
    "BlockTables",
    "Capabilities",
    "DeviceBackend",
    "Fence",
    "HostBuffer",
    "KeySpec",
    "MemoryPlan",
    "ModelCachePolicy",
    "PrefixCacheConfig",
    "PrefixCacheError",
    "PrefixCacheManager",
    "Probe",
    "StageFacts",
    "StageKind",
    "StageOutputs",
    "StepEvents",
    "StepRowsOnly",
    "__version__",
    "list_backends",
    "load_backend",
    "plan_memory",
    "report_backends",
    "stage_prefix_cache_config",
]

_CORE_ROOMS = (
    *("backend", "config", "errors", "events", "key_spec", "manager", "memory_plan", "merge"),
    *("policy", "registry"),
)
_ROOMS = (
    *(f"slotmirror.core.{room}" for room in _CORE_ROOMS),
    *(f"slotmirror.adapters.{room}" for room in ("block_tables", "gate", "stand_in")),
)


def __getattr__(name: str) -> object:
    if name in __all__:
        for room in _ROOMS:
            names = vars(importlib.import_module(room))
            if name in names:
                globals()[name] = names[name]
                return names[name]
    raise AttributeError(f"module 'slotmirror' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
