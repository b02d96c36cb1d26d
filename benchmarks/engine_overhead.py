"""What slotmirror costs a real vLLM engine on the CPU: tokens per second with and without it.

    python benchmarks/engine_overhead.py [--rounds N] [--json FILE] [--markdown FILE]

Run where `vllm` is importable, with `tests/e2e` on PYTHONPATH, as `make bench-engine` does. Three
engines live in one process: the platform's own worker, ours with a callback that drops its rows,
and ours with files. Each round serves the soak of the engine tests, 170 requests, to all three,
batch by batch in turn, in another order each round. Reported are medians over the rounds, and per
step the time that our hooks hold the engine's thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import vllm
from engine_under_test import EngineUnderTest
from scenarios import serve_soak
from tiny_model import Tokens, make_model

from slotmirror.adapters.delivery.request_rows import RequestRows

MODELS = {"2 layers × 64": (2, 64), "8 layers × 512": (8, 512)}
WARM_ROUNDS = 1
HOW = """`make bench-engine`: medians of {rounds} rounds of the soak, 170 requests each, three
engines in turn, one torch thread each. The machine's load over five minutes, other work included,
was {load}. Prompt tokens count as served, whether computed or hit.
With two layers of 64 a step is almost nothing but overhead, the engine's and ours. What is lost
beyond the hooks goes to the delivery's threads, which share the cores and the interpreter's lock
with the engine."""
PLAIN = "plain"
HOOKS = ("step_starts", "forward_done", "sampled")
HEADINGS = (
    "model",
    "engine",
    "tokens/s",
    "of plain",
    "step µs",
    "hooks per step µs",
    "their CPU time µs",
)


@dataclass(frozen=True)
class Overhead:
    """One engine's medians over the rounds."""

    model: str
    engine: str
    tokens_per_s: float
    of_plain: float
    """Median over the rounds of this engine's tokens per second ÷ the plain engine's."""
    step_us: float
    hooks_us: float
    """Wall time of our hooks on the engine's thread; beside other work it holds waits too."""
    hooks_cpu_us: float
    rounds: int


def ignore(_request: RequestRows) -> None:
    """The callback's sink."""


class TimedEngine(EngineUnderTest):
    """Counts tokens, steps and seconds of one round."""

    def __init__(self, name: str, folder: Path, slotmirror: dict[str, Any] | None) -> None:
        plain = {"worker_cls": "auto"} if slotmirror is None else {}
        super().__init__(folder, slotmirror={"debug_slots": False} | (slotmirror or {}), **plain)
        self.name = name
        self.hooks_s: list[tuple[float, float]] = []
        self.rates: list[float] = []
        self.steps_s: list[float] = []
        self._tokens, self._seconds, self._steps = 0, 0.0, 0
        self._count_steps()
        if slotmirror is not None:
            [mirror] = self.llm.collective_rpc(attrgetter("_slotmirror"))
            for hook in HOOKS:
                setattr(mirror, hook, self._timed(getattr(mirror, hook), first=hook == HOOKS[0]))

    def generate(self, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
        """Prompt tokens count as served, whether computed or hit."""
        started_s = time.perf_counter()
        answers = super().generate(prompts, params)
        self._seconds += time.perf_counter() - started_s
        self._tokens += sum(map(len, prompts)) + sum(map(len, answers))
        return answers

    def end_round(self) -> None:
        """Close the round's figures; all rows are delivered before the next one."""
        if self.name != PLAIN:
            self.llm.collective_rpc("slotmirror_flush")
        self.rates.append(self._tokens / self._seconds)
        self.steps_s.append(self._seconds / self._steps)
        self._tokens, self._seconds, self._steps = 0, 0.0, 0
        self.prompts.clear()
        self.outputs.clear()

    def forget(self) -> None:
        """Warm-up is over."""
        self.hooks_s.clear()
        self.rates.clear()
        self.steps_s.clear()

    def _count_steps(self) -> None:
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        execute = executor.execute_model

        def counting(*args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            return execute(*args, **kwargs)

        executor.execute_model = counting

    def _timed(self, hook: Callable[..., None], *, first: bool) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            wall_s, cpu_s = (0.0, 0.0) if first else self.hooks_s.pop()
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            hook(*args)
            cpu_s += time.thread_time() - started_cpu_s
            self.hooks_s.append((wall_s + time.perf_counter() - started_s, cpu_s))

        return timed


def measure(model: str, rounds: int, folder: Path) -> list[Overhead]:
    """All three engines on one model."""
    make_model(folder / "model", *MODELS[model])
    callback = {"sink": "callback", "callback": "engine_overhead:ignore"}
    files = {"sink": "files", "folder": str(folder / "rows")}
    engines = [
        TimedEngine(PLAIN, folder / "model", None),
        TimedEngine("callback", folder / "model", callback),
        TimedEngine("files", folder / "model", files),
    ]
    for number in range(WARM_ROUNDS + rounds):
        turn = number % len(engines)
        serve_soak(engines[turn:] + engines[:turn], Tokens(number))
        for engine in engines:
            engine.end_round()
        if number < WARM_ROUNDS:
            for engine in engines:
                engine.forget()
    results = [overhead(model, engine, engines[0], rounds) for engine in engines]
    for engine in engines:
        engine.shut_down()
    return results


def overhead(model: str, engine: TimedEngine, plain: TimedEngine, rounds: int) -> Overhead:
    """The medians of one engine."""
    hooks = engine.hooks_s or [(0.0, 0.0)]
    pairs = zip(engine.rates, plain.rates, strict=True)
    return Overhead(
        model,
        engine.name,
        statistics.median(engine.rates),
        statistics.median(mine / theirs for mine, theirs in pairs),
        statistics.median(engine.steps_s) * 1e6,
        statistics.median(wall for wall, _ in hooks) * 1e6,
        statistics.median(cpu for _, cpu in hooks) * 1e6,
        rounds,
    )


def markdown(results: list[Overhead]) -> str:
    """A table, one row per engine."""
    rows = [HEADINGS, ["---"] * len(HEADINGS)]
    rows += [
        [
            r.model,
            r.engine,
            f"{r.tokens_per_s:,.0f}",
            f"{r.of_plain:.1%}",
            f"{r.step_us:,.0f}",
            *("–" if r.engine == PLAIN else f"{us:,.0f}" for us in (r.hooks_us, r.hooks_cpu_us)),
        ]
        for r in results
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    results, load_before = [], os.getloadavg()
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            results += measure(model, arguments.rounds, Path(folder))
    load = f"{load_before[1]:.1f} before, {os.getloadavg()[1]:.1f} after"
    table = markdown(results)
    print(table)
    if arguments.markdown is not None:
        text = (
            f"# Overhead on vLLM {vllm.__version__}, {os.cpu_count()} CPU cores\n\n"
            f"{HOW.format(rounds=arguments.rounds, load=load)}\n\n{table}\n"
        )
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.json is not None:
        report = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "vllm": vllm.__version__,
            "load": load,
            "results": [asdict(r) for r in results],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
