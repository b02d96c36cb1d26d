"""slotmirror behind the same few calls."""

from __future__ import annotations

from typing import Any

from slotmirror import (
    AdmittedRequest,
    BlockTables,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
    StepEvents,
    load_backend,
)
from workloads import Step

DRAIN_TIMEOUT_S = 120
STAGING_DEPTH = 8


class Ours:
    """Drives a manager with the workload's steps; the adapter's part is not timed here."""

    name = "slotmirror"

    def __init__(
        self, num_blocks: int, block_size: int, capacity_tokens: int, deferred: str | None
    ):
        config = PrefixCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            staging_depth=STAGING_DEPTH,
            staging_capacity_tokens=capacity_tokens,
        )
        self._cache = PrefixCacheManager(config, load_backend("cpu_ref"))
        keys = frozenset() if deferred is None else frozenset({deferred})
        self._cache.register_policy(ModelCachePolicy(deferred_keys=keys))
        self._tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
        self._events = StepEvents()

    def prepare(self, step: Step) -> None:
        """Build the step's events."""
        self._events = self._tables.step(
            ended=step.ended,
            new=[AdmittedRequest(*facts) for facts in step.new],
            appended=step.appended,
            num_scheduled_tokens=dict(zip(step.req_ids, step.counts, strict=True)),
            num_computed_tokens=dict(zip(step.req_ids, step.first, strict=True)),
        )

    def start(self) -> None:
        """The call before the forward."""
        self._cache.new_step_starts(self._events)

    def save(self, step: Step) -> int:
        """The call after the forward; returns the step id."""
        return self._cache.save_outputs(step.hidden, step.mm, num_tokens_unpadded=step.num_tokens)

    def materialize(self, step_id: int, step: Step) -> tuple[Any, Any]:
        """The call of the builder."""
        out = self._cache.materialize(step_id)
        return out.hidden_states or {}, out.mm_outputs

    def settle(self) -> None:
        """Wait until the mover has carried out everything."""
        self._cache.quiesce(DRAIN_TIMEOUT_S)

    def close(self) -> None:
        """Shut the cache down."""
        self._cache.shutdown()
