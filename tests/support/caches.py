"""Caches under test, and a driver that speaks for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import AdmittedRequest, StepEvents
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.merge import StageOutputs
from slotmirror.core.policy import ModelCachePolicy
from support.driven_runtime import DrivenRuntime, LockCheckedBackend


class Driver:
    """An engine's adapter by hand: a manager, block tables, and the mover in the test's hand.

    The mover acts only in `settle`, or while somebody waits for it.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        block_size: int = 4,
        policy: ModelCachePolicy | None = None,
        backend: DeviceBackend | None = None,
        **settings: Any,
    ) -> None:
        self.runtime = DrivenRuntime()
        self.backend = backend or LockCheckedBackend(self.runtime)
        settings.setdefault("staging_capacity_tokens", 64)
        config = PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size, **settings)
        self.cache = PrefixCacheManager(config, self.backend, self.runtime)
        self.cache.register_policy(policy or ModelCachePolicy())
        self.tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
        self.runtime.actors.append(self.cache._plane.committer.step)

    def start(
        self,
        scheduled: Mapping[str, tuple[int, int]],
        *,
        new: Mapping[str, tuple[int, Sequence[int]]] | None = None,
        resumed: Mapping[str, tuple[int, Sequence[int]]] | None = None,
        **others: Any,
    ) -> StepEvents:
        """Start a step.

        `scheduled[req] = (first position, tokens)`, `new[req] = (computed tokens, blocks)`.
        """
        events = self.tables.step(
            num_scheduled_tokens={r: count for r, (_, count) in scheduled.items()},
            num_computed_tokens={r: first for r, (first, _) in scheduled.items()},
            new=[AdmittedRequest(r, *facts) for r, facts in (new or {}).items()],
            resumed=[AdmittedRequest(r, *facts) for r, facts in (resumed or {}).items()],
            **others,
        )
        self.cache.new_step_starts(events)
        return events

    def save(
        self, hidden: torch.Tensor | None, mm: Mapping[str, object] | None = None, **others: Any
    ) -> int:
        """Save the open step; the token count is that of `hidden` unless given."""
        if "num_tokens_unpadded" not in others and hidden is not None:
            others["num_tokens_unpadded"] = hidden.shape[0]
        return self.cache.save_outputs(hidden, mm or {}, **others)

    def run(
        self,
        scheduled: Mapping[str, tuple[int, int]],
        hidden: torch.Tensor | None,
        mm: Mapping[str, object] | None = None,
        **others: Any,
    ) -> StageOutputs:
        """A whole step: start, save, materialize."""
        self.start(scheduled, **others)
        count = sum(tokens for _, tokens in scheduled.values())
        return self.cache.materialize(self.save(hidden, mm, num_tokens_unpadded=count))

    def settle(self) -> None:
        """Let the mover carry out everything."""
        while self.cache._plane.committer.step():
            pass


def rows(start: int, count: int, width: int = 2) -> torch.Tensor:
    """`(count, width)` float32 rows that tell which they are: row i is filled with start + i."""
    return (start + torch.arange(count, dtype=torch.float32))[:, None].repeat(1, width)


def firsts(tensor: torch.Tensor) -> list[float]:
    """The first element of every row."""
    return [float(row.reshape(-1)[0]) for row in tensor]
