"""Steps of an engine, prepared beforehand, so that only the caches' own calls are timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

BLOCK_SIZE = 16
WIDTH = 2048


@dataclass
class Step:
    """One step: who runs, where, and the tensors that the forward leaves behind."""

    req_ids: list[str]
    first: list[int]
    counts: list[int]
    slots: torch.Tensor
    hidden: torch.Tensor
    mm: dict[str, torch.Tensor]
    new: list[tuple[str, int, list[int]]] = field(default_factory=list)
    appended: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(self.counts)


@dataclass(frozen=True)
class Workload:
    """A named sequence of steps; sizes for the caches that serve it."""

    name: str
    num_blocks: int
    capacity_tokens: int
    deferred: str | None = None


def rows(count: int, keys: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden rows, `(count, 2048)` bf16, and `keys - 1` further outputs like it."""
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, WIDTH, generator=generator).to(torch.bfloat16)
    return hidden, {f"layer_{k}": hidden + k for k in range(1, keys)}


def decode(requests: int, keys: int, steps: int, *, blocks_each: int = 16) -> Iterator[Step]:
    """A steady batch in which every request decodes one token per step."""
    ids = [f"request-{i}" for i in range(requests)]
    hidden, mm = rows(requests, keys)
    base = torch.arange(requests, dtype=torch.int64) * blocks_each * BLOCK_SIZE
    for position in range(min(steps, blocks_each * BLOCK_SIZE)):
        starts_block = position % BLOCK_SIZE == 0
        blocks = (
            {r: [i * blocks_each + position // BLOCK_SIZE] for i, r in enumerate(ids)}
            if starts_block
            else {}
        )
        yield Step(
            req_ids=ids,
            first=[position] * requests,
            counts=[1] * requests,
            slots=base + position,
            hidden=hidden,
            mm=mm,
            new=[(r, 0, b) for r, b in blocks.items()] if position == 0 else [],
            appended={} if position == 0 else blocks,
        )


def prefill(tokens: int, keys: int, steps: int) -> Iterator[Step]:
    """One prompt after the other, into the same blocks, none of them hit."""
    hidden, mm = rows(tokens, keys)
    blocks = list(range(tokens // BLOCK_SIZE))
    for number in range(steps):
        yield Step(
            req_ids=[f"prompt-{number}"],
            first=[0],
            counts=[tokens],
            slots=torch.arange(tokens, dtype=torch.int64),
            hidden=hidden,
            mm=mm,
            new=[(f"prompt-{number}", 0, blocks)],
            ended=[f"prompt-{number - 1}"] if number else [],
        )


def hits(tokens: int, keys: int, steps: int) -> Iterator[Step]:
    """A prompt of `tokens`, then requests that hit all of it and compute one block more."""
    yield from prefill(tokens, keys, 1)
    hidden, mm = rows(BLOCK_SIZE, keys)
    shared = list(range(tokens // BLOCK_SIZE))
    for number in range(steps):
        block = len(shared) + number % 8
        slots = block * BLOCK_SIZE + torch.arange(BLOCK_SIZE, dtype=torch.int64)
        yield Step(
            req_ids=[f"hit-{number}"],
            first=[tokens],
            counts=[BLOCK_SIZE],
            slots=slots,
            hidden=hidden,
            mm=mm,
            new=[(f"hit-{number}", tokens, [*shared, block])],
            ended=[f"hit-{number - 1}" if number else "prompt-0"],
        )
