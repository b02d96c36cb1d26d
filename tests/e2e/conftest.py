"""Runs the scenarios that the selected tests judge, all of them before the first test.

`make e2e` makes the engine's environment and names its interpreter in `SLOTMIRROR_E2E_PYTHON`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Outcome = dict[str, Any]


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marks by which a test names what it judges, and what no adapter can mend."""
    config.addinivalue_line("markers", "scenario(name): the scenario whose facts the test judges")
    config.addinivalue_line(
        "markers", "engine_fault(version, message): how that vLLM version itself fails there"
    )


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What came of every scenario that a selected test names, by its name."""
    names = dict.fromkeys(
        mark.args[0] for item in request.session.items for mark in item.iter_markers("scenario")
    )
    folder = tmp_path_factory.mktemp("e2e")
    return {outcome["name"]: outcome for outcome in run_scenarios(folder, list(names))}


@pytest.fixture
def facts(request: pytest.FixtureRequest, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """The facts of the test's scenario; a scenario that failed fails its test."""
    mark = request.node.get_closest_marker("scenario")
    outcome = outcomes.get(mark.args[0], {"error": "the run ended before it"})
    if "error" in outcome:
        installed = outcomes["make_models"]["facts"]["vllm"]
        for fault in request.node.iter_markers("engine_fault"):
            version, message = fault.args
            if version == installed and message in outcome["error"]:
                pytest.skip(f"vLLM {version} fails by itself: {message}")
        pytest.fail(f"{outcome['error']}\n{outcome.get('log', '')}", pytrace=False)
    facts: dict[str, Any] = outcome["facts"]
    return facts


def run_scenarios(folder: Path, names: list[str]) -> Iterator[Outcome]:
    """Each scenario's outcome as it ends; what is of interest of it is printed."""
    command = [os.environ["SLOTMIRROR_E2E_PYTHON"], str(HERE / "run_scenarios.py"), str(folder)]
    messages = folder / "run_scenarios.log"
    print()
    with (
        messages.open("w") as stderr,
        subprocess.Popen(
            [*command, *names],
            env=engine_environment(folder),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as running,
    ):
        for line in running.stdout or ():
            outcome = json.loads(line)
            print(f"{outcome['seconds']:6.1f} s  {outcome['name']}: {summary(outcome)}", flush=True)
            yield outcome
    if running.returncode:
        print(messages.read_text(encoding="utf-8", errors="replace"))


def summary(outcome: Outcome) -> str:
    """Counts and differences of one scenario."""
    if "error" in outcome:
        return "FAILED"
    shown = {k: v for k, v in outcome["facts"].items() if isinstance(v, int | float | str)}
    return (
        ", ".join(
            f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in shown.items()
        )
        or "done"
    )


def engine_environment(folder: Path) -> dict[str, str]:
    """This checkout, one thread, no network, caches of its own."""
    overlay = os.environ.get("SLOTMIRROR_E2E_OVERLAY")
    """An unpacked wheel of another vLLM version, over the environment's own."""
    paths = [overlay, str(ROOT / "src"), str(HERE)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    environment.setdefault("VLLM_CACHE_ROOT", str(folder / "vllm-cache"))
    return environment
