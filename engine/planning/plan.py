"""Capacity planning: what prefix caching could save on a trace, without running a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from slotmirror.core.errors import ConfigError
from slotmirror.engine.planning.pool import PlannedPool
from slotmirror.engine.planning.rates import TraceRates
from slotmirror.engine.planning.requests import (
    PlannedRequest,
    planned_chat_requests,
    planned_mooncake_requests,
)
from slotmirror.engine.replay_options import DEFAULT_BLOCK_SIZE
from slotmirror.engine.traces import ReadOptions, TraceFormat, detect_format
from slotmirror.engine.traces.mooncake import MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to plan with.

    Attributes:
        num_blocks: size of the pool, block 0 included, which is never used; None: endless.
        block_size: tokens of a block. A Mooncake trace has its own, 512; None takes that, or 16
            for a chat file.
        read: which requests; lengths are never scaled.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    read: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Result of planning: the trace's rates, and those of the pool if one was given."""

    format: TraceFormat
    rates: TraceRates
    pool: PlannedPool | None

    @property
    def pool_rate(self) -> float | None:
        """Prompt tokens that the pool's hits spare, over all; None without a pool."""
        return None if self.pool is None else self.pool.hit_tokens / self.rates.prompt_tokens

    def to_json(self) -> dict[str, object]:
        """The plan as plain values."""
        rates = self.rates
        return {
            "format": str(self.format),
            "block_size": rates.block_size,
            "requests": rates.requests,
            "prompt_tokens": rates.prompt_tokens,
            "output_tokens": rates.output_tokens,
            "blocks": rates.blocks,
            "distinct_blocks": rates.distinct_blocks,
            "hit_tokens": rates.hit_tokens,
            "hit_blocks": rates.hit_blocks,
            "engine_hit_tokens": rates.engine_hit_tokens,
            "token_rate": rates.token_rate,
            "block_rate": rates.block_rate,
            "engine_rate": rates.engine_rate,
            "pool": None if self.pool is None else self._pool_json(self.pool),
        }

    def _pool_json(self, pool: PlannedPool) -> dict[str, object]:
        return {
            "num_blocks": pool.num_blocks,
            "hit_tokens": pool.hit_tokens,
            "hit_rate": self.pool_rate,
            "evictions": pool.evictions,
            "requests_too_long": pool.requests_too_long,
        }


def plan_trace(path: Path, options: PlanOptions) -> TracePlan:
    """Stream a trace through the rates, and through a pool if `num_blocks` is set.

    Raises:
        TraceError: the file or one of its lines is unusable.
        ConfigError: a setting does not fit the file.
    """
    found = detect_format(path)
    block_size = _block_size(found, options)
    rates = TraceRates(block_size)
    pool = None if options.num_blocks is None else PlannedPool(options.num_blocks, block_size)
    for request in _requests(path, found, options.read, block_size):
        rates.add(request)
        if pool is not None:
            pool.serve(request)
    return TracePlan(found, rates, pool)


def _block_size(found: TraceFormat, options: PlanOptions) -> int:
    block_size = options.block_size
    if found is TraceFormat.MOONCAKE:
        if options.read.scale != 1:
            raise ConfigError("scale", options.read.scale, "planning keeps the trace's lengths")
        if block_size not in (None, MOONCAKE_BLOCK_TOKENS):
            rule = f"planning uses the trace's own blocks of {MOONCAKE_BLOCK_TOKENS} tokens"
            raise ConfigError("block_size", block_size, rule)
        return MOONCAKE_BLOCK_TOKENS
    if block_size is not None and block_size < 1:
        raise ConfigError("block_size", block_size, "must be at least 1")
    return DEFAULT_BLOCK_SIZE if block_size is None else block_size


def _requests(
    path: Path, found: TraceFormat, read: ReadOptions, block_size: int
) -> Iterator[PlannedRequest]:
    if found is TraceFormat.MOONCAKE:
        return islice(planned_mooncake_requests(path), read.limit)
    return planned_chat_requests(path, read, block_size)
