"""Host memory of a whole pipeline on one node, beside the limits of that node."""

from slotmirror.engine.node_memory.limits import Limit, Memlock, memlock_limit, memory_limits
from slotmirror.engine.node_memory.plan import NodePlan, StageMemory, Verdict, plan_node
from slotmirror.engine.node_memory.stages import StageSettings, parse_key, read_stages

__all__ = [
    "Limit",
    "Memlock",
    "NodePlan",
    "StageMemory",
    "StageSettings",
    "Verdict",
    "memlock_limit",
    "memory_limits",
    "parse_key",
    "plan_node",
    "read_stages",
]
