"""All that the mutants know of the core: the parts that they replace, the fields that they touch.

When the core's rooms move, this file follows; a part that is gone is an ImportError or an
AttributeError here, not a mutant that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from slotmirror.core import data_plane, open_keys, oplog, split
from slotmirror.core import manager as managers
from slotmirror.core.buffers import rows_view
from slotmirror.core.committer import Committer
from slotmirror.core.data_plane import DataPlane
from slotmirror.core.deferred import DeferredRows, DeviceBudget
from slotmirror.core.device_outputs import DeviceOutputs
from slotmirror.core.hit_registry import HitRegistry
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.operations import GatherTask, WriteTask
from slotmirror.core.saving import StepSaver
from slotmirror.core.slot_table import SlotTable
from slotmirror.core.staging import StagingPage, StagingRing
from slotmirror.core.unconsumed import UnconsumedSteps
from slotmirror.core.write_task import TaskProgress

NOT_OPEN = -1
"""What the open batch says of a slot without a row in it, and of a row that is dead."""


@dataclass(frozen=True, slots=True)
class Part:
    """One function or method of the core, by its owner and its name."""

    owner: Any
    name: str

    @property
    def original(self) -> Callable[..., Any]:
        """As it is now; to be taken before it is replaced."""
        found: Callable[..., Any] = getattr(self.owner, self.name)
        return found

    def replace(self, patches: pytest.MonkeyPatch, by: Callable[..., Any]) -> None:
        """Put something else in its place; raises if it is not there."""
        patches.setattr(self.owner, self.name, by)


# Tables: hits, slots, owners.
SPANS_OF_HITS = Part(HitRegistry, "_spans")
PLAN_HITS = Part(SlotTable, "plan_hits")
CLAIM = Part(SlotTable, "claim")
MARK_WRITTEN = Part(SlotTable, "mark_written")
TAKE_STEP = Part(UnconsumedSteps, "take")
CHECK_REPLAYS = Part(UnconsumedSteps, "_check_replays")

# From the device to the pool.
SOURCES_OF_COPIES = Part(StagingRing, "_sources")
LET_GO_OF_PAGE = Part(StagingRing, "let_go")
GIVE_UP_LAUNCH = Part(StagingRing, "give_up")
ARRIVE_ON_PAGE = Part(StagingPage, "arrive")
RUN_WRITE = Part(WriteTask, "run")
ADVANCE_TASK = Part(TaskProgress, "advance")

# The open batch and its budget.
CLOSE_BATCH = Part(DeferredRows, "close")
ADD_DEFERRED = Part(DeferredRows, "add")
KILL_DEFERRED = Part(DeferredRows, "kill")
APPEND_BATCH = Part(StepSaver, "close_batch")
RESERVE_BYTES = Part(DeviceBudget, "reserve")
RELEASE_BYTES = Part(DeviceBudget, "release")
HALF_FULL = Part(DeviceBudget, "is_half_full")
FITS = Part(DeviceBudget, "fits")

# Reads and outputs.
PLAN_GATHERS = Part(DataPlane, "gathers_of")
MAKE_GATHER = Part(data_plane, "GatherTask")
RUN_GATHER = Part(GatherTask, "run")
AWAIT_ROWS = Part(DataPlane, "await_rows")
MERGE_OUTPUTS = Part(managers, "merge_outputs")
MATERIALIZE = Part(PrefixCacheManager, "materialize")
FORGET_SENT = Part(DeviceOutputs, "forget_finished")
UNPACK_LEFTOVERS = Part(LeftoverPack, "unpack")

# The mover, the log, the manager.
CARRY_OUT = Part(Committer, "_carry_out")
APPEND = Part(oplog.OpLog, "append")
COMPLETE = Part(oplog.OpLog, "complete")
BIND_MOVER = Part(Committer, "_bind")
WAIT_FENCE = Part(Committer, "wait_fence")
CLOSE_PLANE = Part(DataPlane, "close")
WITHOUT_TRACEBACKS = Part(oplog, "without_tracebacks")
MAKE_MANAGER = Part(PrefixCacheManager, "__init__")
CHECK_USABLE = Part(PrefixCacheManager, "_check_usable")

# What a save takes for rows.
CHECK_LAYOUT = Part(open_keys, "check_layout")
HIDDEN_ROWS = Part(split, "_hidden_rows")
IS_PER_TOKEN = Part(split, "is_per_token")


# -- fields ----------------------------------------------------------------------------------


def read_pool_now(gather: Any) -> None:
    """Fill a gather's output from the pool as the pool is now."""
    _out_of(gather)[:] = gather.key.rows[gather.slots]


def _out_of(gather: Any) -> Any:
    return rows_view(gather.lease, gather.key.spec)[: len(gather.slots)]


def zero_absent_rows(gather: Any) -> None:
    """The other half of a gather: absent rows read zeros."""
    out = _out_of(gather)
    out[gather.zero_rows] = np.zeros((), out.dtype)


def hits_without_own_rows(table: Any, hit_slots: Any) -> Any:
    """Hit rows as the pool has them, whatever the step itself computes."""
    return np.full(len(hit_slots), -1), table._present[hit_slots]


def mark_present(table: Any, slots: Any, key_indices: Any) -> None:
    """These keys are present in these slots; nothing is said of the others."""
    table._present[np.ix_(slots, key_indices)] = True


def forget_hits_of_omitted_keys(step: Any) -> None:
    """Let go of the reads of keys that the step did not compute itself."""
    for name in set(step.gathers) - {key.name for key in step.saved_keys}:
        del step.gathers[name]


def slots_of_open_batch(deferred: Any) -> list[Any]:
    """Per step in the open batch the slots of its rows."""
    return list(deferred._batch.slots)


def open_steps_of(deferred: Any) -> Any:
    """Per slot the step of the open batch whose row it waits for, or `NOT_OPEN`."""
    return deferred._open_step


def forget_what_is_read(page: Any) -> None:
    """Let go of what the copy into this page reads; it still counts as under way."""
    page._pairs = [(target, target) for _, target in page._pairs]


def charge(budget: Any, num_bytes: int) -> None:
    """Reserve bytes without asking whether there are any."""
    budget.bytes_reserved += num_bytes
    high = max(budget._stats.device_bytes_high, budget.bytes_reserved)
    budget._stats.device_bytes_high = high


def is_live(registry: Any, req_id: str) -> bool:
    """Whether the registry knows an owner of this name."""
    return req_id in registry._row_of


def block_size_of(registry: Any) -> int:
    """Slots per block."""
    size: int = registry._block_size
    return size


def unconsumed_step(manager: Any, step_id: int) -> Any:
    """A step that waits for its consumer, None if there is none."""
    return manager._tables.steps._steps.get(step_id)


def plane_of(manager: Any) -> Any:
    """What tells one cache from another."""
    return manager._plane


def claim_timeout_s(mover: Any) -> float:
    """`staging_claim_timeout_s` of the mover's cache."""
    seconds: float = mover._config.staging_claim_timeout_s
    return seconds


def log_of(mover_or_manager: Any) -> oplog.OpLog:
    """The log of a mover, or of a manager."""
    log: oplog.OpLog = mover_or_manager._log
    return log


def manager_lock_of(manager: Any) -> Any:
    """The lock over a manager's tables."""
    return manager._tables.lock


def forget_opened_keys(manager: Any) -> None:
    """Let a manager open its keys again."""
    manager._keys.by_name.clear()


def forget_sources(outputs: Any, timeout_s: float = 0.0) -> bool:
    """Let go of every source of a copy to the device, whether it has run or not."""
    outputs._running.clear()
    return True
