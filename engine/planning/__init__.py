"""Capacity planning on traces: hit rates with endless memory and with a pool of fixed size."""

from slotmirror.engine.planning.plan import PlanOptions, TracePlan, plan_capacity, plan_trace
from slotmirror.engine.planning.pool import PlannedPool
from slotmirror.engine.planning.rates import TraceRates
from slotmirror.engine.planning.requests import PlannedRequest

__all__ = [
    "PlanOptions",
    "PlannedPool",
    "PlannedRequest",
    "TracePlan",
    "TraceRates",
    "plan_capacity",
    "plan_trace",
]
