"""Steps of an engine, prepared beforehand, so that only the caches' own calls are timed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

BLOCK_SIZE = 16
WIDTH = 2048
CODES_KEY = "codes"


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


@functools.cache
def rows(tokens: int, keys: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden rows, `(tokens, 2048)` bf16, and `keys - 1` further outputs like it."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(torch.bfloat16)
    return hidden, {f"layer_{k}": hidden + k for k in range(1, keys)}


def decode(requests: int, keys: int, steps: int, *, blocks_each: int = 2) -> Iterator[Step]:
    """A steady batch in which every request decodes one token per step.

    When their blocks are full the requests end and others take the same blocks, so that after one
    such round all memory has been touched.
    """
    hidden, mm = rows(requests, keys)
    base = torch.arange(requests, dtype=torch.int64) * blocks_each * BLOCK_SIZE
    ids: list[str] = []
    for number in range(steps):
        generation, position = divmod(number, blocks_each * BLOCK_SIZE)
        block, within = divmod(position, BLOCK_SIZE)
        ended, new, appended = [], [], {}
        if position == 0:
            ended, ids = ids, [f"request-{generation}-{i}" for i in range(requests)]
            new = [(r, 0, [i * blocks_each]) for i, r in enumerate(ids)]
        elif within == 0:
            appended = {r: [i * blocks_each + block] for i, r in enumerate(ids)}
        yield Step(
            req_ids=ids,
            first=[position] * requests,
            counts=[1] * requests,
            slots=base + position,
            hidden=hidden,
            mm=mm,
            new=new,
            appended=appended,
            ended=ended,
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


def slots_of(blocks: list[int], first: int, count: int) -> torch.Tensor:
    """The slots of positions `first … first + count - 1` of a request with these blocks."""
    positions = torch.arange(first, first + count, dtype=torch.int64)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def side_by_side(number: int, parts: list[Step], keys: int, codes: bool) -> Step:
    """Several requests' parts of one step as a batch, with rows that differ from step to step."""
    tokens = sum(part.num_tokens for part in parts)
    hidden, mm = rows(tokens, keys)
    mm = {key: value.roll(number + 1, 0) for key, value in mm.items()}
    if codes:
        values = torch.arange(tokens * 16, dtype=torch.int64).view(tokens, 16)
        mm[CODES_KEY] = values + number * 1_000_003
    return Step(
        req_ids=[r for part in parts for r in part.req_ids],
        first=[f for part in parts for f in part.first],
        counts=[c for part in parts for c in part.counts],
        slots=torch.cat([part.slots for part in parts]),
        hidden=hidden.roll(number, 0),
        mm=mm,
        new=[n for part in parts for n in part.new],
        appended={r: ids for part in parts for r, ids in part.appended.items()},
        ended=[r for part in parts for r in part.ended],
    )


def part(req_id: str, blocks: list[int], first: int, count: int, **changes: Any) -> Step:
    """What one request computes in a step; its rows are added by `side_by_side`."""
    slots = slots_of(blocks, first, count)
    return Step([req_id], [first], [count], slots, torch.empty(0), {}, **changes)


def chunks(name: str, blocks: list[int], chunk: int) -> Iterator[Step]:
    """Prompts that fill `blocks`, one after the other, computed `chunk` tokens at a time."""
    previous: list[str] = []
    for number in count():
        req_id = f"{name}-{number}"
        for first in range(0, len(blocks) * BLOCK_SIZE, chunk):
            begins = {"new": [(req_id, 0, blocks)], "ended": previous} if first == 0 else {}
            yield part(req_id, blocks, first, chunk, **begins)
        previous = [req_id]


def lane(name: str, shared: list[int], own: list[int], codes_tokens: int) -> Iterator[Step]:
    """Short requests one after the other, each of which takes over the blocks of its predecessor.

    One hits `shared` and computes 32 tokens into its own first two blocks; the next hits those as
    well and computes 16 tokens into the third; the one after that overwrites them. Each goes on to
    decode `codes_tokens` tokens in its last block.
    """
    previous: list[str] = []
    for number in count():
        req_id = f"{name}-{number}"
        blocks = [*shared, *own]
        hit = len(shared) * BLOCK_SIZE + (number % 2) * 2 * BLOCK_SIZE
        tokens = BLOCK_SIZE if number % 2 else 2 * BLOCK_SIZE
        yield part(req_id, blocks, hit, tokens, new=[(req_id, hit, blocks)], ended=previous)
        for position in range(hit + tokens, hit + tokens + codes_tokens):
            yield part(req_id, blocks, position, 1)
        previous = [req_id]


def mixed(
    requests: int, steps: int, *, chunk: int = 256, prompt_blocks: int = 128
) -> Iterator[Step]:
    """Decoding requests beside prompts that are computed in chunks."""
    prompts = chunks("prompt", list(range(prompt_blocks)), chunk)
    for number, running in enumerate(decode(requests, 1, steps)):
        shifted = shift(running, prompt_blocks)
        yield side_by_side(number, [shifted, next(prompts)], 1, codes=False)


def shift(step: Step, blocks: int) -> Step:
    """The same step in blocks further up."""
    return replace(
        step,
        slots=step.slots + blocks * BLOCK_SIZE,
        new=[(r, hit, [b + blocks for b in ids]) for r, hit, ids in step.new],
        appended={r: [b + blocks for b in ids] for r, ids in step.appended.items()},
    )


def recycling(
    lanes: int, steps: int, *, shared_blocks: int = 16, codes: bool = False, chunk: int = 0
) -> Iterator[Step]:
    """Blocks change hands all the time, and every other request hits what is soon overwritten.

    With `codes` a second key, `CODES_KEY`, of 16 integers per token; with `chunk` a lane of
    prompts in chunks of so many tokens, eight to a prompt.
    """
    shared = list(range(shared_blocks))
    yield side_by_side(0, [part("shared", shared, 0, shared_blocks * BLOCK_SIZE,
                                new=[("shared", 0, shared)])], 1, codes)  # fmt: skip
    lines = [
        lane(f"lane-{i}", shared, list(range(shared_blocks + 4 * i, shared_blocks + 4 * i + 4)), 5)
        for i in range(lanes)
    ]
    # Lanes are at different points of their requests' lives.
    starts = [i % 6 for i in range(lanes)]
    if chunk:
        first = shared_blocks + 4 * lanes
        prompt = list(range(first, first + 8 * chunk // BLOCK_SIZE))
        lines.append(chunks("prompt", prompt, chunk))
        starts.append(0)
    for number in range(1, steps):
        running = [next(line) for line, start in zip(lines, starts, strict=True) if number > start]
        if number == 1:
            running[0] = replace(running[0], ended=["shared"])
        yield side_by_side(number, running, 1, codes)
