"""What both sides are built from: settings and requests, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Scope:
    """What a version decides as 0.25.1 does; the rest is not drawn for it."""

    windows: bool = True
    drafts: bool = True
    encoder: bool = True
    min_tokens: bool = True
    long_prefill_token_threshold: bool = True


Window = int
Group = tuple[int, Window | None]
"""Block size, and the sliding window or None for full attention; both in tokens."""

_VOCABULARY = 50
_FEATURES_MAX = 8
"""vLLM lets go of a request's encoder outputs in the order of a set of their indices; ours in
that of the features. For indices below 8 the two are the same."""


@dataclass(frozen=True)
class ManagerPlan:
    """Settings of a KV-cache manager, and how it is driven."""

    num_blocks: int
    groups: tuple[Group, ...]
    max_model_len: int
    max_batched_tokens: int
    enable_caching: bool = True
    use_eagle: bool = False
    watermark: float = 0.0
    lookahead: int = 0
    full_sequence_must_fit: bool = False
    algo: str = "sha256"
    retention_interval: int | None = None
    int_hashes: bool = False

    @property
    def scheduler_block_size(self) -> int:
        return math.lcm(*(size for size, _ in self.groups))

    @property
    def hash_block_size(self) -> int:
        if len(self.groups) == 1 or not self.enable_caching:
            return self.scheduler_block_size
        return math.gcd(*(size for size, _ in self.groups))


@dataclass(frozen=True)
class SchedulerPlan:
    """Settings of a scheduler over a manager."""

    manager: ManagerPlan
    max_num_seqs: int
    policy: str
    reserve_full_isl: bool
    long_prefill_token_threshold: int
    num_drafts: int
    encoder_budget: int
    encoder_cache_size: int


@dataclass(frozen=True)
class RequestPlan:
    """A request; features are (identifier, offset, length)."""

    req_id: str
    tokens: tuple[int, ...]
    max_tokens: int = 50
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    salt: str | None = None
    lora: str | None = None
    features: tuple[tuple[str, int, int], ...] = ()
    skip_reading: bool = False
    priority: int = 0
    arrival_time: float = 0.0


def draw_manager(rng: random.Random, scope: Scope) -> ManagerPlan:
    """A manager of a random shape."""
    size = rng.choice([2, 4, 4, 8])
    shapes = ["full", "full", "off"]
    if scope.windows:
        shapes += ["window", "hybrid", "hybrid", "three", "mixed", "several sizes"]
    shape = rng.choice(shapes)
    groups = _draw_groups(rng, shape, size)
    has_window = any(window is not None for _, window in groups)
    lcm = math.lcm(*(block for block, _ in groups))
    return ManagerPlan(
        num_blocks=rng.choice([16, 24, 32, 60]),
        groups=groups,
        max_model_len=rng.choice([64, 128, 256]),
        max_batched_tokens=rng.choice([16, 32, 64]),
        enable_caching=shape != "off",
        use_eagle=rng.random() < 0.3,
        watermark=rng.choice([0.0, 0.0, 0.1, 0.2]),
        lookahead=rng.choice([0, 0, 2, 3]),
        full_sequence_must_fit=rng.random() < 0.6,
        algo=rng.choice(["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]),
        retention_interval=rng.choice([0, lcm, 2 * lcm])
        if has_window and shape != "off" and rng.random() < 0.2
        else None,
        int_hashes=rng.random() < 0.3,
    )


def draw_scheduler(rng: random.Random, scope: Scope) -> SchedulerPlan:
    """A scheduler of a random shape."""
    size = rng.choice([2, 4, 4, 8])
    shape = rng.choice(["full", "full", "window", "hybrid"]) if scope.windows else "full"
    batched = rng.choice([8, 16, 24, 48])
    drafts = rng.choice([0, 0, 0, 1, 2, 3]) if scope.drafts else 0
    caching = rng.random() < 0.9
    manager = ManagerPlan(
        num_blocks=rng.choice([20, 28, 40]),
        groups=_draw_groups(rng, shape, size),
        max_model_len=rng.choice([48, 96]),
        max_batched_tokens=batched,
        enable_caching=caching,
        use_eagle=bool(drafts) and rng.random() < 0.6,
        watermark=rng.choice([0.0, 0.0, 0.1, 0.2]),
    )
    return SchedulerPlan(
        manager,
        max_num_seqs=rng.choice([2, 4, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        reserve_full_isl=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 5])
        if scope.long_prefill_token_threshold
        else 0,
        num_drafts=drafts,
        encoder_budget=rng.choice([8, 12, 24]),
        encoder_cache_size=rng.choice([8, 12, 24]),
    )


class RequestSource:
    """Random requests that share beginnings, adapters, salts and images."""

    def __init__(
        self, rng: random.Random, scope: Scope, max_model_len: int, feature_tokens_max: int
    ) -> None:
        """`feature_tokens_max` 0: no request has images."""
        self._rng, self._scope = rng, scope
        self._max_model_len = max_model_len
        self._feature_tokens_max = feature_tokens_max
        self._beginnings = [
            [rng.randrange(_VOCABULARY) for _ in range(rng.choice([8, 20, 33]))] for _ in range(3)
        ]
        self._count = 0

    def draw(self) -> RequestPlan:
        rng = self._rng
        number, self._count = self._count, self._count + 1
        shared = rng.choice(self._beginnings)
        tokens = shared[: rng.randrange(1, len(shared) + 1)] if rng.random() < 0.8 else []
        tokens = tokens + [rng.randrange(50, 60) for _ in range(rng.randrange(1, 14))]
        tokens = tokens[: self._max_model_len - 8]
        max_tokens = rng.randrange(1, 14)
        return RequestPlan(
            req_id=f"r{number}",
            tokens=tuple(tokens),
            max_tokens=max_tokens,
            min_tokens=min(rng.choice([0, 0, 2]), max_tokens) if self._scope.min_tokens else 0,
            stop_token_ids=rng.choice([(), (70,), (61, 62)]),
            salt=rng.choice([None] * 4 + ["s1", "la", ""]),
            lora=rng.choice([None] * 4 + ["la", "lb"]),
            features=self._draw_features(len(tokens)) if self._feature_tokens_max else (),
            skip_reading=rng.random() < 0.1,
            priority=rng.randrange(3),
            arrival_time=float(number),
        )

    def _draw_features(self, num_tokens: int) -> tuple[tuple[str, int, int], ...]:
        rng = self._rng
        features: list[tuple[str, int, int]] = []
        if rng.random() < 0.7:
            return ()
        offset = rng.randrange(6)
        while len(features) < _FEATURES_MAX:
            length = rng.randrange(1, min(9, self._feature_tokens_max + 1))
            if offset + length > num_tokens:
                break
            # An identifier stands for one content, hence for one length.
            features.append((f"image{rng.randrange(3)}-{length}", offset, length))
            offset += length + rng.randrange(4)
        return tuple(features)


def own_object(text: str | None) -> str | None:
    """An equal string of its own: vLLM's pickled hashes depend on which strings are one object,
    and so do ours in format `v0_25` (X6)."""
    return text and (text + " ")[:-1]


def _draw_groups(rng: random.Random, shape: str, size: int) -> tuple[Group, ...]:
    def window() -> int:
        return rng.choice([1, 2, size, size + 1, 2 * size, 3 * size, 3 * size + 1])

    if shape == "window":
        return ((size, window()),)
    if shape == "hybrid":
        return ((size, None), (size, window()))
    if shape == "three":
        return ((size, window()), (size, None), (size, window()))
    if shape == "mixed":
        small, large = rng.choice([(1, 2), (2, 1), (1, 4)])
        return ((size * small, None), (size * large, window()))
    if shape == "several sizes":
        return ((size * 2, None), (size, window()), (size * 4, window()))
    return ((size, None),)
