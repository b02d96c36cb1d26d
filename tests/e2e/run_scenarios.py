"""`python run_scenarios.py FOLDER NAME…`: each scenario in a process of its own, two at a time.

Engines of several ranks have the machine to themselves: their ranks spin while they wait for each
other. The processes are forked from one that has imported the engine and started nothing: the
import takes longer than most scenarios. Each writes FOLDER/NAME.log. A line of JSON is printed as
each one ends: its name, its seconds, and its facts or what went wrong.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

PROCESSES = 2
TIMEOUT_S = 300
LOG_TAIL_CHARACTERS = 8_000

MODULES = {
    "both_runners": "scenarios_runners",
    "data_parallel": "scenarios_replicas",
    "example": "scenarios_processes",
    "gate": "scenarios_gate",
    "make_models": "tiny_model",
    "names_read": "scenarios_runners",
    "omni_installed": "scenarios_omni",
    "omni_side_by_side": "scenarios_omni",
    "pipeline_parallel": "scenarios_parallel",
    "shared_memory_from_another_process": "scenarios_processes",
    "tensor_parallel": "scenarios_parallel",
    "tensor_parallel_on_ray": "scenarios_parallel",
}
"""Where a scenario is, if not with the others."""

ENGINE_PROCESS = {"data_parallel", "example", "shared_memory_from_another_process"}
"""Scenarios whose engine core runs in a process of its own, as it does for users."""

SEVERAL_RANKS = {
    "data_parallel",
    "pipeline_parallel",
    "tensor_parallel",
    "tensor_parallel_on_ray",
}

PRELOADED = ["engine_under_test", "vllm.model_executor.models.qwen3", "vllm.v1.worker.cpu_worker"]


def main(folder: Path, names: list[str]) -> None:
    """Run them and print what came of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    _report(_in_own_process(context, "make_models", folder))
    for name in names:
        if name in SEVERAL_RANKS:
            _report(_in_own_process(context, name, folder))
    with ThreadPoolExecutor(PROCESSES) as pool:
        running = [
            pool.submit(_in_own_process, context, name, folder)
            for name in names
            if name not in SEVERAL_RANKS
        ]
        for ended in as_completed(running):
            _report(ended.result())


def _report(outcome: dict[str, Any]) -> None:
    print(json.dumps(outcome), flush=True)


def _in_own_process(context: Any, name: str, folder: Path) -> dict[str, Any]:
    started_s = time.monotonic()
    process = context.Process(target=_run, args=(name, folder), name=name)
    process.start()
    process.join(TIMEOUT_S + 10)
    if process.is_alive():
        process.kill()
        process.join()
    written = _outcome_path(name, folder)
    if written.exists():
        outcome = json.loads(written.read_text(encoding="utf-8"))
    else:
        outcome = {"error": f"it ended with exit code {process.exitcode}"}
    if "error" in outcome:
        log = _log_path(name, folder).read_text(encoding="utf-8", errors="replace")
        outcome["log"] = log[-LOG_TAIL_CHARACTERS:]
    return {"name": name, "seconds": round(time.monotonic() - started_s, 1), **outcome}


def _run(name: str, folder: Path) -> None:
    """In the scenario's own process."""
    log = os.open(_log_path(name, folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(name in ENGINE_PROCESS))
    try:
        outcome = {"facts": _facts(name, folder)}
    except Exception:
        outcome = {"error": traceback.format_exc()}
    partial = _outcome_path(name, folder).with_suffix(".partial")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.replace(_outcome_path(name, folder))


def _facts(name: str, folder: Path) -> dict[str, Any]:
    scenario = getattr(import_module(MODULES.get(name, "scenarios")), name)
    facts: dict[str, Any] = scenario(folder / "model")
    return facts | {"threads_left": list(_threads_left())}


def _threads_left() -> Iterator[str]:
    return (t.name for t in threading.enumerate() if t.name.startswith("slotmirror"))


def _log_path(name: str, folder: Path) -> Path:
    return folder / f"{name}.log"


def _outcome_path(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
