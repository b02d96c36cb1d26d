"""`python run_scenario.py NAME,… MODEL_FOLDER`: run scenarios, print their facts as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = {
    "both_runners": "scenarios_runners",
    "names_read": "scenarios_runners",
    "pipeline_parallel": "scenarios_parallel",
    "tensor_parallel": "scenarios_parallel",
    "gate": "scenarios_gate",
    "omni_installed": "scenarios_omni",
    "omni_side_by_side": "scenarios_omni",
    "shared_memory_from_another_process": "scenarios_processes",
}
"""Where a scenario is, if not with the others."""


def main(names: list[str], folder: Path) -> None:
    """Run them in turn; the last line of the output is the facts of each, by name."""
    facts = {name: _run(name, folder) for name in names}
    print(json.dumps(facts), flush=True)
    if "gather_before_write" in names:
        # Its withheld write keeps a page for ever: there is nothing orderly to shut down.
        os._exit(0)


def _run(name: str, folder: Path) -> dict[str, Any]:
    if not name.startswith("omni"):
        from tiny_model import make_model

        make_model(folder)
    facts: dict[str, Any] = getattr(import_module(MODULES.get(name, "scenarios")), name)(folder)
    facts["threads_left"] = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("slotmirror")
    ]
    return facts


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
