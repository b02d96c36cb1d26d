"""What must hold when a run has come to rest, and when its cache was shut down."""

from __future__ import annotations

import gc

from slotmirror.conformance.explorer.faults import FaultJudge, FaultPlanned, Trouble
from slotmirror.conformance.explorer.scheduler import ScheduleError
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.rows import HOST_KEY, SPECS
from slotmirror.conformance.traces.trace import Trace
from slotmirror.core.manager import PrefixCacheManager

_QUIESCE_S = 1000.0


def settle(cache: PrefixCacheManager, judge: FaultJudge) -> None:
    """Let the log drain; errors are the judge's."""
    try:
        cache.quiesce(_QUIESCE_S)
    except Exception as error:
        judge.judge(error)


def check_idle(cache: PrefixCacheManager, trace: Trace) -> None:
    """All is consumed and nothing has failed: no page is held, no budget was exceeded."""
    stats = cache.stats()
    if stats["pages_held"] or stats["log_length"] or stats["unconsumed_steps"]:
        raise ScheduleError(f"something is left when all is consumed: {stats}")
    high, most = stats["device_bytes_high"], _device_bytes_max(trace)
    if not isinstance(high, int) or high > most:
        raise ScheduleError(f"{high} B of deferred clones, allowed are {most}")


def _device_bytes_max(trace: Trace) -> int:
    """The budget, or the largest single step, which is admitted alone (W4)."""
    deferred = trace.policy.deferred_keys - {HOST_KEY}
    steps = [
        sum(SPECS[key].row_bytes for key in deferred.intersection(step.keys))
        * sum(len(part.slots) for part in step.parts)
        for step in trace.steps
    ]
    return max(trace.config.device_staging_bytes_max, *steps)


def check_released(
    cache: PrefixCacheManager,
    backend: SimulatedBackend,
    fault: FaultPlanned | None,
    *,
    gave_up: bool,
) -> None:
    """After the shutdown: no byte is held, and the device saw its contract kept.

    `gave_up` says that the shutdown lasted as long as it may wait for the device.
    """
    if backend.violations:
        raise ScheduleError(f"the device's contract was broken: {backend.violations}")
    left = _bytes_left(cache, backend)
    if left:
        gc.collect()  # an error that was met on purpose may be part of a cycle
        left = _bytes_left(cache, backend)
    if left and not _may_stay(fault, gave_up):
        raise ScheduleError(f"bytes are left after the shutdown: {left}")


def _bytes_left(cache: PrefixCacheManager, backend: SimulatedBackend) -> dict[str, int]:
    left = {**cache.memory_stats(), "host": backend.open_host_bytes}
    left["device"] = backend.live_device_bytes
    del left["idle_output_bytes"]
    return {name: count for name, count in left.items() if count}


def _may_stay(fault: FaultPlanned | None, gave_up: bool) -> bool:
    """Whether memory may be left to the process (S3).

    Only where the shutdown gave up: the device stood still for too long, or time ran out.
    """
    if fault is None:
        return False
    return fault.kind is Trouble.TIME_OUT or (fault.kind is Trouble.STALL and gave_up)
