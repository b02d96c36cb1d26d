"""What the real engine is put through; each scenario runs in a process of its own.

A scenario takes the folder of the tiny model and returns plain facts, which its check judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_under_test import (
    EngineUnderTest,
    compare_all,
    compare_engines,
    compare_prompts,
    keys_of_all,
    sampling,
)
from tiny_model import VOCABULARY, Reference, Tokens

Facts = dict[str, Any]


def _facts(engine: EngineUnderTest, **more: Any) -> Facts:
    config = engine.llm.llm_engine.vllm_config
    return {
        "requests": sum(len(samples) for samples in engine.outputs.values()),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        **more,
    }


def _shared_prefixes(tokens: Tokens, count: int) -> list[list[int]]:
    """Prompts over four prefixes; some are a prefix of another, some end on a block."""
    prefixes = [tokens.sequence(length) for length in (40, 96, 130, 200)]
    return [
        prefixes[tokens.number(0, 4)] + tokens.sequence(tokens.number(1, 90)) for _ in range(count)
    ]


def serve_soak(engines: Sequence[EngineUnderTest], tokens: Tokens) -> None:
    """170 requests to each engine in turn: shared prefixes, identical prompts, multi-turn."""
    batches = [_shared_prefixes(tokens, 60) for _ in range(2)]
    same = tokens.sequence(150)
    batches.append([same] * 8 + [same[:96], [*same, 1, 2, 3]])
    for prompts in batches:
        for engine in engines:
            engine.generate(prompts, sampling(4))
    conversations = [tokens.sequence(tokens.number(20, 60)) for _ in range(10)]
    for _ in range(4):
        answers = [engine.generate(conversations, sampling(12)) for engine in engines]
        conversations = [
            prompt + answer + tokens.sequence(9)
            for prompt, answer in zip(conversations, answers[0], strict=True)
        ]


def soak(folder: Path) -> Facts:
    """Caching on against off."""
    on = EngineUnderTest(folder, slotmirror={"layers": [0]})
    off = EngineUnderTest(folder, "off", slotmirror={"layers": [0]})
    serve_soak((on, off), Tokens(1))
    stats, stats_off = on.finish(), off.finish()
    reference = Reference(folder, torch.float32)
    facts = _facts(
        on,
        worst=max(compare_prompts(on, reference), compare_prompts(off, reference)),
        worst_on_off=compare_engines(on, off),
        keys=keys_of_all(on),
        stats=stats,
        stats_off=stats_off,
    )
    on.shut_down()
    off.shut_down()
    return facts


def samples_and_aborts(folder: Path) -> Facts:
    """n = 3, and requests that are aborted before, in and after their prefill."""
    tokens = Tokens(2)
    engine = EngineUnderTest(folder, max_num_batched_tokens=64)
    prompts = _shared_prefixes(tokens, 16)
    engine.generate(prompts, sampling(6, n=3, temperature=1.0))
    llm_engine = engine.llm.llm_engine
    aborted = [tokens.sequence(180) for _ in range(12)]
    for number, prompt in enumerate(aborted):
        llm_engine.add_request(f"gone-{number}", {"prompt_token_ids": prompt}, sampling(20))
        llm_engine.step()
        if number % 3:
            llm_engine.abort_request([f"gone-{number}"])
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    # What the aborted ones computed serves as a prefix, whoever computed it (W3, D3).
    engine.generate([prompt[:150] + tokens.sequence(20) for prompt in aborted], sampling(4))
    stats = engine.finish()
    worst = compare_prompts(engine, Reference(folder, torch.float32))
    return _facts(engine, worst=worst, stats=stats)


def chunked_prefill(folder: Path) -> Facts:
    """Prompts longer than a step; synchronous scheduling."""
    tokens = Tokens(3)
    on = EngineUnderTest(folder, max_num_batched_tokens=64, async_scheduling=False)
    off = EngineUnderTest(folder, "off", max_num_batched_tokens=64, async_scheduling=False)
    for _ in range(2):
        prompts = _shared_prefixes(tokens, 30)
        for engine in (on, off):
            engine.generate(prompts, sampling(3))
    stats, _ = on.finish(), off.finish()
    worst = compare_prompts(on, Reference(folder, torch.float32))
    return _facts(on, worst=worst, worst_on_off=compare_engines(on, off), stats=stats)


def preemption(folder: Path) -> Facts:
    """18 blocks for 24 growing requests: preempted, resumed with fresh hits; every position."""
    tokens = Tokens(4)
    counter = _PreemptionCounter()
    engine = EngineUnderTest(folder, slotmirror={"deliver": "all"}, num_gpu_blocks_override=18)
    counter.watch(engine)
    for _ in range(3):
        prefix = tokens.sequence(64)
        prompts = [prefix + tokens.sequence(tokens.number(5, 60)) for _ in range(24)]
        engine.generate(prompts, sampling(60))
    stats = engine.finish(end_requests=True)
    worst = compare_all(engine, Reference(folder, torch.float32))
    return _facts(engine, worst=worst, stats=stats, preemptions=counter.count)


class _PreemptionCounter:
    """Counts preempted requests as the worker is told of them."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, engine: EngineUnderTest) -> None:
        executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def counting(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += len(scheduler_output.preempted_req_ids or ())
            return execute(scheduler_output, *args, **kwargs)

        executor.execute_model = counting


def ngram_drafts(folder: Path) -> Facts:
    """Synchronous speculative decoding on repetitive prompts: rejected drafts leave no row."""
    tokens = Tokens(5)
    engine = EngineUnderTest(
        folder,
        slotmirror={"deliver": "all"},
        async_scheduling=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    for _ in range(3):
        phrase = tokens.sequence(24)
        prompts = [phrase * 4 + tokens.sequence(tokens.number(1, 20)) for _ in range(14)]
        engine.generate(prompts, sampling(40))
    stats = engine.finish(end_requests=True)
    worst = compare_all(engine, Reference(folder, torch.float32))
    return _facts(engine, worst=worst, stats=stats)


def asynchronous(folder: Path) -> Facts:
    """The next step is scheduled before this one's tokens are known; requests stop unforeseen."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def keep_asynchronous(cls: type, vllm_config: Any) -> None:
        update(cls, vllm_config)  # which switches it off as of no use here
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(keep_asynchronous)
    tokens = Tokens(9)
    counter = _PreemptionCounter()
    engine = EngineUnderTest(folder, slotmirror={"deliver": "all"}, num_gpu_blocks_override=18)
    counter.watch(engine)
    stops = list(range(0, VOCABULARY, 32))
    for _ in range(3):
        prefix = tokens.sequence(64)
        prompts = [prefix + tokens.sequence(tokens.number(5, 60)) for _ in range(20)]
        engine.generate(prompts, sampling(60, temperature=1.0, stop_token_ids=stops))
    stats = engine.finish(end_requests=True)
    worst = compare_all(engine, Reference(folder, torch.float32))
    past_the_end = sum(
        len(rows.rows["hidden_states"]) >= len(engine.prompts[r]) + len(engine.outputs[r][0])
        for r, [rows] in engine.delivered().items()
    )
    return _facts(
        engine, worst=worst, stats=stats, preemptions=counter.count, past_the_end=past_the_end
    )


def bfloat16(folder: Path) -> Facts:
    """bf16: on and off are equal where shapes are; the reference within its precision."""
    tokens = Tokens(6)
    on = EngineUnderTest(folder, dtype="bfloat16", slotmirror={"layers": [0]})
    off = EngineUnderTest(folder, "off", dtype="bfloat16", slotmirror={"layers": [0]})
    for prompt in _shared_prefixes(tokens, 24):
        for engine in (on, off):
            engine.generate([prompt], sampling(2))
    stats, _ = on.finish(), off.finish()
    worst = compare_prompts(on, Reference(folder, torch.bfloat16))
    return _facts(on, worst=worst, worst_on_off=compare_engines(on, off), stats=stats)


def inductor(folder: Path) -> Facts:
    """A compiled model."""
    tokens = Tokens(7)
    engine = EngineUnderTest(folder, enforce_eager=False)
    for _ in range(2):
        engine.generate(_shared_prefixes(tokens, 16), sampling(3))
    stats = engine.finish()
    worst = compare_prompts(engine, Reference(folder, torch.float32))
    return _facts(engine, worst=worst, stats=stats)


def gather_before_write(folder: Path) -> Facts:
    """The negative control: rows enter the pool a write late, behind the next step's reads."""
    from slotmirror.backends.cpu_ref import CpuRefBackend

    scatter_slots, held = CpuRefBackend.scatter_slots, []

    def a_write_late(self: CpuRefBackend, pool: Any, slots: Any, rows: Any) -> None:
        for late in held:
            scatter_slots(self, *late)
        held[:] = [(pool, slots.copy(), rows.copy())]

    CpuRefBackend.scatter_slots = a_write_late  # type: ignore[method-assign]
    tokens = Tokens(8)
    engine = EngineUnderTest(folder)
    prompt = tokens.sequence(150)
    for _ in range(2):
        engine.generate([prompt], sampling(1))
    stats = engine.finish()
    worst = compare_prompts(engine, Reference(folder, torch.float32))
    engine.shut_down()
    return _facts(engine, worst=worst, stats=stats)


def wrong_slots(folder: Path) -> Facts:
    """The negative control of the slot guard: our table of a request is not the engine's."""
    from slotmirror.adapters.errors import SlotMismatchError
    from slotmirror.adapters.vllm.scheduler_events import SchedulerTranslator

    translate = SchedulerTranslator.translate

    def with_two_slots_swapped(self: SchedulerTranslator, *step: Any) -> Any:
        events = translate(self, *step)
        if len(events.slots) > 8:
            events.slots[[7, 8]] = events.slots[[8, 7]]
        return events

    SchedulerTranslator.translate = with_two_slots_swapped  # type: ignore[method-assign]
    engine = EngineUnderTest(folder)
    try:
        engine.generate([Tokens(10).sequence(40)], sampling(1))
    except SlotMismatchError as stopped:
        report = str(stopped)
    else:
        report = "the engine went on"
    engine.shut_down()
    return {"report": report}
