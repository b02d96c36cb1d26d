"""Capacity planning: what prefix caching could save on a trace, without running a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from slotmirror.core.errors import ConfigError
from slotmirror.engine.planning.pool import PlannedPool
from slotmirror.engine.planning.rates import TraceRates
from slotmirror.engine.planning.requests import (
    PlannedRequest,
    planned_bailian_requests,
    planned_chat_requests,
    planned_mooncake_requests,
)
from slotmirror.engine.replay_options import DEFAULT_BLOCK_SIZE
from slotmirror.engine.traces import ReadOptions, TraceFormat, detect_format
from slotmirror.engine.traces.bailian import BAILIAN_BLOCK_TOKENS
from slotmirror.engine.traces.mooncake import MOONCAKE_BLOCK_TOKENS

_TRACE_BLOCK_TOKENS = {
    TraceFormat.MOONCAKE: MOONCAKE_BLOCK_TOKENS,
    TraceFormat.BAILIAN: BAILIAN_BLOCK_TOKENS,
}
_CURVE_SPAN = 500
"""The smallest pool of a curve is this much smaller than what never to evict takes."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What to plan with.

    Attributes:
        pool_sizes: blocks of each pool to try, block 0 included, which is never used.
        block_size: tokens of a block. A block trace has its own, 512 (Mooncake) or 16 (Bailian);
            None takes that, or 16 for a chat file.
        read: which requests; lengths are never scaled.
    """

    pool_sizes: tuple[int, ...] = ()
    block_size: int | None = None
    read: ReadOptions = field(default_factory=ReadOptions)


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Result of planning: the trace's rates, and a pool for each size that was given."""

    format: TraceFormat
    rates: TraceRates
    pools: tuple[PlannedPool, ...]

    def rate_of(self, pool: PlannedPool) -> float:
        """Prompt tokens that the pool's hits spare, over all prompt tokens."""
        return pool.hit_tokens / self.rates.prompt_tokens

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
            "pools": [self._pool_json(pool) for pool in self.pools],
        }

    def _pool_json(self, pool: PlannedPool) -> dict[str, object]:
        return {
            "num_blocks": pool.num_blocks,
            "hit_tokens": pool.hit_tokens,
            "hit_rate": self.rate_of(pool),
            "evictions": pool.evictions,
            "requests_too_long": pool.requests_too_long,
        }


def plan_trace(path: Path, options: PlanOptions) -> TracePlan:
    """Stream a trace through the rates and through every pool, once.

    Raises:
        TraceError: the file or one of its lines is unusable.
        ConfigError: a setting does not fit the file.
    """
    found = detect_format(path)
    block_size = _block_size(found, options)
    rates = TraceRates(block_size)
    pools = tuple(PlannedPool(size, block_size) for size in options.pool_sizes)
    for request in _requests(path, found, options.read, block_size):
        rates.add(request)
        for pool in pools:
            pool.serve(request)
    return TracePlan(found, rates, pools)


def plan_capacity(path: Path, options: PlanOptions) -> TracePlan:
    """`plan_trace` with the given pool sizes, or with sizes that show where the trace fits.

    Raises as `plan_trace`.
    """
    if options.pool_sizes:
        return plan_trace(path, options)
    needed = plan_trace(path, options).rates.distinct_blocks
    return plan_trace(path, replace(options, pool_sizes=round_sizes(needed)))


def round_sizes(num_blocks: int) -> tuple[int, ...]:
    """Round numbers (1, 2, 5, 10, 20, …) from a small share of `num_blocks` to all of them."""
    sizes: list[int] = []
    decade = 1
    while not sizes or sizes[-1] < num_blocks:
        for digit in (1, 2, 5):
            size = digit * decade
            is_enough = bool(sizes) and sizes[-1] >= num_blocks
            if size >= max(2, num_blocks / _CURVE_SPAN) and not is_enough:
                sizes.append(size)
        decade *= 10
    return tuple(sizes)


def _block_size(found: TraceFormat, options: PlanOptions) -> int:
    block_size, own = options.block_size, _TRACE_BLOCK_TOKENS.get(found)
    if own is not None:
        if options.read.scale != 1:
            raise ConfigError("scale", options.read.scale, "planning keeps the trace's lengths")
        if block_size not in (None, own):
            rule = f"planning uses the trace's own blocks of {own} tokens"
            raise ConfigError("block_size", block_size, rule)
        return own
    if block_size is not None and block_size < 1:
        raise ConfigError("block_size", block_size, "must be at least 1")
    return DEFAULT_BLOCK_SIZE if block_size is None else block_size


def _requests(
    path: Path, found: TraceFormat, read: ReadOptions, block_size: int
) -> Iterator[PlannedRequest]:
    if found is TraceFormat.CHAT:
        return planned_chat_requests(path, read, block_size)
    planned = (
        planned_mooncake_requests if found is TraceFormat.MOONCAKE else planned_bailian_requests
    )
    return islice(planned(path), read.limit)
