"""What kinds of attention share the pool, and the block sizes that follow (spec kv 1.4, 5)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class AttentionSpec:
    """KV cache of one kind of attention layer: `block_size` tokens per block.

    A non-causal spec (prefix LM, bidirectional attention) makes a token's KV depend on later
    tokens: prefix caching and chunked prefill must be off (seed 2, limits).
    """

    kind: ClassVar[str]

    block_size: int
    non_causal: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be >= 1, got {self.block_size}")

    @property
    def window_tokens(self) -> int | None:
        """Tokens a query can see, None if all."""
        return None


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Every token sees all earlier ones: blocks are held until the request ends."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A token sees itself and the `sliding_window - 1` tokens before it."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"sliding_window must be >= 1, got {self.sliding_window}")

    @property
    def window_tokens(self) -> int | None:
        return self.sliding_window


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share block tables. `is_eagle_group`: read by a draft head (EAGLE, MTP)."""

    spec: AttentionSpec
    is_eagle_group: bool = False


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool's size and the groups that draw from it; block 0 is the null block."""

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks must be >= 2 (block 0 is never handed out), got {self.num_blocks}"
            )

    @property
    def is_causal(self) -> bool:
        return not any(group.spec.non_causal for group in self.groups)


def resolve_block_sizes(
    groups: Sequence[KVCacheGroupSpec],
    *,
    enable_caching: bool = True,
    hash_block_size: int | None = None,
) -> tuple[int, int]:
    """(scheduler block size, hash block size) in tokens.

    Hits are multiples of the scheduler block size, the least common multiple of the groups';
    hashes cover the greatest common divisor unless `hash_block_size` is given, so that a group
    with larger blocks reuses every k-th hash. Raises ValueError if it does not divide them all.
    """
    sizes = [group.spec.block_size for group in groups]
    scheduler_block_size = math.lcm(*sizes)
    if len(sizes) <= 1 or not enable_caching:
        return scheduler_block_size, scheduler_block_size
    resolved = hash_block_size if hash_block_size is not None else math.gcd(*sizes)
    if any(size % resolved for size in sizes):
        raise ValueError(
            f"hash_block_size={resolved} must divide every group's block size, got {sizes}"
        )
    return scheduler_block_size, resolved
