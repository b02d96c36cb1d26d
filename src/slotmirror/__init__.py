"""slotmirror: one host row per KV slot for every per-token output of a pipeline stage.

An LLM engine with prefix caching computes only the tail of a prompt whose beginning it knows.
slotmirror keeps what the next pipeline stage needs of that beginning, and hands out the whole.
"""

from slotmirror.core.backend import Capabilities, DeviceBackend, Fence, HostBuffer, Probe
from slotmirror.core.block_tables import BlockTables
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
    "StageOutputs",
    "StepEvents",
    "__version__",
    "list_backends",
    "load_backend",
    "plan_memory",
    "report_backends",
]
