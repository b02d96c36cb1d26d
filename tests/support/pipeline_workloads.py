"""Workloads and backends for pipeline tests: seeded requests, row comparison, broken gathers."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.backend import HostRows, SlotIndex
from slotmirror.engine.pipeline_types import STAGES, PipelineOutput, PipelineRequest
from slotmirror.engine.stage_output import StageOutput
from slotmirror.kvcache.request_params import MultimodalFeature

IMAGE_TOKEN = 300


def conversations(
    count: int, turns: int, *, system_length: int, turn_length: int, seed: int = 0
) -> list[PipelineRequest]:
    """Multi-turn chats over three system prompts; every turn extends the one before."""
    rng = random.Random(seed)
    systems = [_tokens(rng, system_length) for _ in range(3)]
    requests: list[PipelineRequest] = []
    for chat in range(count):
        history, before = systems[chat % 3], None
        for turn in range(turns):
            history = [*history, *_tokens(rng, rng.randrange(1, 2 * turn_length))]
            req_id = f"chat-{chat}/turn-{turn}"
            requests.append(
                PipelineRequest(
                    req_id,
                    history,
                    max_tokens=rng.randrange(1, 10),
                    max_frames=rng.randrange(1, 6),
                    after=before,
                )
            )
            before = req_id
    return requests


def long_decodes(count: int, *, seed: int = 0) -> list[PipelineRequest]:
    """Short prompts that share prefixes, with outputs that outgrow a small KV cache."""
    rng = random.Random(seed)
    systems = [_tokens(rng, 24) for _ in range(3)]
    return [
        PipelineRequest(
            f"r{index}",
            [*systems[index % 3][: rng.choice((8, 16, 24))], *_tokens(rng, rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 40),
            max_frames=rng.randrange(1, 40),
        )
        for index in range(count)
    ]


def mixed_requests(count: int, *, seed: int = 0) -> list[PipelineRequest]:
    """Salts, images at several offsets, repeated prompts and chained turns, with long outputs."""
    rng = random.Random(seed)
    requests: list[PipelineRequest] = []
    for index in range(count):
        base = [7] * rng.choice((4, 8, 12))
        image = rng.choice((None, None, "cat", "dog", "owl", "bee", "fox"))
        length = {"cat": 9, "dog": 12}.get(image, 6) if image else 0
        after = rng.choice(requests).req_id if requests and rng.random() < 0.5 else None
        requests.append(
            PipelineRequest(
                f"r{index}",
                [*base, *[IMAGE_TOKEN] * length, *_tokens(rng, rng.randrange(1, 12))],
                max_tokens=rng.randrange(1, 30),
                max_frames=rng.randrange(1, 30),
                mm_features=(MultimodalFeature(image, len(base), length),) if image else (),
                cache_salt=rng.choice((None, None, "tenant")),
                after=after,
            )
        )
    return requests


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def equal_rows(a: Mapping[str, PipelineOutput], b: Mapping[str, PipelineOutput]) -> bool:
    """Whether two runs delivered the same bytes and tokens, each row as often."""
    return a.keys() == b.keys() and all(
        _equal_stage(a[req_id].stage(name), b[req_id].stage(name))
        for req_id in a
        for name in STAGES
    )


def _equal_stage(a: StageOutput, b: StageOutput) -> bool:
    return (
        a.output_token_ids == b.output_token_ids
        and a.rows.keys() == b.rows.keys()
        and all(torch.equal(a.rows[key], b.rows[key]) for key in a.rows)
        and all(np.array_equal(a.deliveries[key], b.deliveries[key]) for key in a.rows)
    )


def with_stage(output: PipelineOutput, stage: str, changed: StageOutput) -> PipelineOutput:
    """`output` with the output of one stage replaced."""
    return replace(output, **{stage: changed})


def with_rows(output: StageOutput, key: str, rows: torch.Tensor) -> StageOutput:
    """`output` with the rows of one key replaced."""
    return replace(output, rows={**output.rows, key: rows})


class ShiftingBackend(CpuRefBackend):
    """Reads one wrong slot: the first row of the gather number `broken_gather`, counted from 0."""

    def __init__(self, broken_gather: int) -> None:
        super().__init__()
        self._left = broken_gather

    def gather_slots(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        self._left -= 1
        if self._left == -1:
            slots = slots.copy()
            slots[0] += 1
        super().gather_slots(pool, slots, out)


class FailingBackend(CpuRefBackend):
    """Every gather of hit rows fails."""

    def gather_slots(self, pool: HostRows, slots: SlotIndex, out: HostRows) -> None:
        raise OSError("no such page")


def all_token_ids(output: StageOutput) -> Sequence[int]:
    """Prompt and decoded tokens."""
    return (*output.prompt_token_ids, *output.output_token_ids)
