"""Everything that only a real device can show, in one run of at most eight minutes.

    python tests/device/run_device_checks.py --backend cuda --json device.json

Needs torch, numpy, pytest and hypothesis beside slotmirror. Each section is one entry of the JSON
file; one that fails is reported there and does not stop the others. Exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slotmirror import (
    AdmittedRequest,
    BlockTables,
    DeviceBackend,
    ModelCachePolicy,
    PrefixCacheConfig,
    PrefixCacheManager,
    load_backend,
)
from slotmirror.conformance.backend_suite.performing import default_workbench
from slotmirror.conformance.backend_suite.report import report_on
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench
from slotmirror.conformance.calibration import calibrate
from slotmirror.conformance.golden.check import check_backend

BUDGET_S = 460
REQUESTS = 256
WIDTH = 2048
MIB = 1 << 20


class Machine:
    """The backend under test and what every section needs of it."""

    def __init__(self, name: str, *, quick: bool) -> None:
        self.name = name
        self.quick = quick
        self.backend: DeviceBackend = load_backend(name)
        self.bench: Workbench = default_workbench(self.backend)
        self.stream = self.backend.new_stream()
        self.fence = self.backend.new_fence()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Zeros on the device."""
        return self.bench.tensor(torch.zeros(shape, dtype=dtype))

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Launch one copy behind the engine's stream."""
        pairs = [(source, destination)]
        self.backend.copy_to_host(pairs, self.stream, self.backend.current_stream(), self.fence)

    def finish(self) -> None:
        """Wait for the last copy without a pause: times of microseconds are measured."""
        deadline = time.monotonic() + WAIT_S
        while not self.fence.done():
            if time.monotonic() > deadline:
                raise TimeoutError("a copy does not end")


def conformance(machine: Machine) -> dict[str, Any]:
    """The whole kit."""
    report = report_on(machine.name)
    return {**report.as_json(), "ok": report.ok}


def golden_traces(machine: Machine) -> dict[str, Any]:
    """Recorded deliveries, in all four modes."""
    report = check_backend(machine.name)
    found = [str(difference) for difference in report.differences[:20]]
    return {"ok": report.ok, "deliveries": report.takes, "differences": found}


def bandwidth(machine: Machine) -> dict[str, Any]:
    """GB/s device → host by size of a copy, page-locked and pageable, beside the link's."""
    sizes = [8 << 10, 128 << 10, MIB, 16 * MIB, 256 * MIB]
    found: dict[str, Any] = {"ok": True, "link_gb_s": link_gb_s(machine.backend.device)}
    for pinned in (True, False):
        rates = {}
        for size in sizes[:3] if machine.quick else sizes:
            source = machine.tensor(size)
            buffer = machine.backend.alloc_host((size,), torch.uint8, pinned=pinned)
            rates[size] = size / _seconds(machine, source, buffer.tensor) / 1e9
            buffer.close()
        found["page_locked_gb_s" if pinned else "pageable_gb_s"] = rates
    if found["link_gb_s"]:
        found["share_of_the_link"] = max(found["page_locked_gb_s"].values()) / found["link_gb_s"]
    return found


def link_gb_s(device: torch.device, buses: Path = Path("/sys/bus/pci/devices")) -> float | None:
    """GB/s that the device's PCIe link carries one way, headers included; None if unknown.

    The link slows down while it is idle, so its speed is the greatest that both ends know; its
    width is the present one, which a bad slot lowers.
    """
    asked = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    found = None if asked is None else asked(device)
    place = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return None
    folder = buses / "{:04x}:{:02x}:{:02x}.0".format(*place)
    try:
        transfers = float((folder / "max_link_speed").read_text().split()[0])
        lanes = int((folder / "current_link_width").read_text())
    except (OSError, ValueError):
        return None
    payload = 128 / 130 if transfers >= 8 else 8 / 10
    return transfers * payload * lanes / 8


def _seconds(machine: Machine, source: torch.Tensor, destination: torch.Tensor) -> float:
    """Median of one copy, from its launch to its end."""
    times = []
    for _ in range(3 if machine.quick else 20):
        started = time.perf_counter()
        machine.copy(source, destination)
        machine.finish()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class Timeline:
    """When streams reach marks, in the device's own clock; says why where it has no such events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self._reason = ""

    def mark(self, name: str, stream: Any) -> None:
        """Put a mark behind what is now in `stream`."""
        try:
            event = getattr(torch, self._device.type).Event(enable_timing=True)
            event.record(stream)
            self._marks.append((name, event))
        except Exception as error:
            self._reason = f"no timing events: {error}"

    def ms(self) -> dict[str, Any]:
        """Milliseconds of each mark after the first; all have been reached."""
        times = {name: self._marks[0][1].elapsed_time(event) for name, event in self._marks}
        return {"unavailable": self._reason} if self._reason else times


def overlap(machine: Machine) -> dict[str, Any]:
    """A copy beside a long computation: it must neither hold the engine nor add to its time."""
    size = (1 if machine.quick else 1024) * MIB
    source = machine.tensor(size)
    buffer = machine.backend.alloc_host((size,), torch.uint8, pinned=True)
    copy_s = _seconds(machine, source, buffer.tensor)
    engine, started = machine.backend.new_fence(), time.perf_counter()
    with machine.bench.busy():
        engine.record(machine.backend.current_stream())
    engine.wait(WAIT_S)
    compute_s = time.perf_counter() - started
    # The copy's `after` is an idle stream: nothing but the hardware can serialise the two.
    idle = machine.backend.new_stream()
    timeline, current = Timeline(machine.backend.device), machine.backend.current_stream()
    started = time.perf_counter()
    timeline.mark("compute starts", current)
    with machine.bench.busy():
        timeline.mark("compute ends", current)
        engine.record(current)
        timeline.mark("copy starts", machine.stream)
        pairs, launch_started = [(source, buffer.tensor)], time.perf_counter()
        machine.backend.copy_to_host(pairs, machine.stream, idle, machine.fence)
        launch_us = (time.perf_counter() - launch_started) * 1e6
        timeline.mark("copy ends", machine.stream)
    engine.wait(WAIT_S)
    machine.finish()
    both_s = time.perf_counter() - started
    buffer.close()
    hidden = (copy_s + compute_s - both_s) / copy_s
    return {
        "ok": not machine.bench.can_be_busy or (hidden > 0.5 and launch_us < 1e6 * copy_s),
        "copy_ms": copy_s * 1e3,
        "compute_ms": compute_s * 1e3,
        "both_ms": both_s * 1e3,
        "hidden_share_of_the_copy": hidden,
        "launch_us": launch_us,
        "timeline_ms": timeline.ms(),
    }


def decode_step(machine: Machine) -> dict[str, Any]:
    """Engine-thread microseconds of a decode step of 256 requests, 2048 × bfloat16."""
    blocks = REQUESTS * 16
    config = PrefixCacheConfig(num_blocks=blocks, block_size=16, staging_capacity_tokens=REQUESTS)
    cache = PrefixCacheManager(config, machine.backend)
    cache.register_policy(ModelCachePolicy())
    tables = BlockTables(num_blocks=blocks, block_size=16)
    names = [f"request-{i}" for i in range(REQUESTS)]
    hidden = machine.tensor(REQUESTS, WIDTH, dtype=torch.bfloat16)
    starts, saves = [], []
    steps = 20 if machine.quick else 200
    for position in range(steps):
        admitted = [AdmittedRequest(n, 0, range(16 * i, 16 * i + 16)) for i, n in enumerate(names)]
        events = tables.step(
            num_scheduled_tokens=dict.fromkeys(names, 1),
            num_computed_tokens=dict.fromkeys(names, position),
            new=admitted if position == 0 else [],
        )
        begun = time.perf_counter()
        cache.new_step_starts(events)
        started = time.perf_counter()
        step_id = cache.save_outputs(hidden, {}, num_tokens_unpadded=REQUESTS)
        saved = time.perf_counter()
        starts.append(started - begun)
        saves.append(saved - started)
        cache.materialize(step_id)
    cache.shutdown()
    warm = slice(steps // 4, None)
    new_step_us = statistics.median(starts[warm]) * 1e6
    save_us = statistics.median(saves[warm]) * 1e6
    p99_us = float(np.percentile(np.add(starts, saves)[warm], 99)) * 1e6
    return {
        "ok": new_step_us + save_us < 1000 or not machine.backend.capabilities.async_copy,
        "new_step_starts_us": new_step_us,
        "save_outputs_us": save_us,
        "both_p99_us": p99_us,
    }


def direct_capture(machine: Machine) -> dict[str, Any]:
    """From which run length on copies straight into the pool are faster than page and scatter."""
    abilities = machine.backend.capabilities
    if not (abilities.async_copy and abilities.pinned_host):
        return {"ok": True, "refused": "copies are synchronous or memory is not page-locked"}
    found = calibrate(machine.backend, row_bytes=4096, repeats=5 if machine.quick else 30)
    times = {entry.rows: [entry.page_us, entry.direct_us] for entry in found.times}
    return {"ok": True, "crossover_rows": found.crossover_rows, "page_and_direct_us": times}


def capture_elsewhere(machine: Machine) -> dict[str, Any]:
    """While this thread captures a graph in the global mode, another one asks for our fences."""
    module = getattr(torch, machine.backend.device.type, None)
    graph_class = getattr(module, "CUDAGraph", None) or getattr(module, "NPUGraph", None)
    if module is None or graph_class is None:
        return {"ok": True, "refused": f"no graphs on {machine.backend.device.type}"}
    import threading

    tensor, graph, answers = machine.tensor(1024, dtype=torch.float32), graph_class(), []
    fence = machine.backend.new_fence()
    fence.record(machine.stream)

    def ask() -> None:
        machine.backend.bind_thread(machine.backend.device)
        answers.append(fence.wait(WAIT_S))

    with module.graph(graph, capture_error_mode="global"):
        tensor.add_(1)
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(WAIT_S)
        tensor.add_(1)
    graph.replay()
    module.synchronize()
    return {"ok": answers == [True] and float(tensor[0]) == 2.0, "asked": answers}


def page_locked_bytes(machine: Machine) -> dict[str, Any]:
    """What we say was page-locked beside what torch's allocator says, and how long it took."""
    module = getattr(torch, machine.backend.device.type, None)
    stats = getattr(module, "host_memory_stats", None)
    before = dict(stats()) if stats is not None else {}
    started = time.perf_counter()
    buffer = machine.backend.alloc_host(((3 if machine.quick else 700) * MIB,), torch.uint8,
                                        pinned=True)  # fmt: skip
    seconds = time.perf_counter() - started
    after = dict(stats()) if stats is not None else {}
    found = {
        "ok": buffer.pinned == machine.backend.capabilities.pinned_host,
        "reserved_bytes": buffer.reserved_bytes,
        "allocator_grew_by": {k: after[k] - before[k] for k in after if "bytes" in k},
        "seconds_per_gib": seconds / (buffer.tensor.nbytes / (1 << 30)),
    }
    buffer.close()
    return found


SECTIONS: tuple[Callable[[Machine], dict[str, Any]], ...] = (
    conformance,
    golden_traces,
    bandwidth,
    overlap,
    decode_step,
    direct_capture,
    capture_elsewhere,
    page_locked_bytes,
)


def main(arguments: list[str]) -> int:
    """Run all sections, or those named; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="cuda", help="cuda, npu, or another one's name")
    parser.add_argument("--json", type=Path, default=Path("device.json"))
    parser.add_argument("--only", nargs="*", choices=[s.__name__ for s in SECTIONS])
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script")
    options = parser.parse_args(arguments)
    # Host copies are not what is measured, and a pool of threads would disturb what is.
    torch.set_num_threads(1)
    started = time.monotonic()
    machine = Machine(options.backend, quick=options.quick)
    report: dict[str, Any] = {
        "backend": options.backend,
        "device": str(machine.backend.device),
        "machine": platform.platform(),
        "torch": str(torch.__version__),
        "quick": options.quick,
    }
    sections = [s for s in SECTIONS if not options.only or s.__name__ in options.only]
    for section in sections:
        if time.monotonic() - started > BUDGET_S:
            report[section.__name__] = {"ok": False, "error": "no time was left"}
        else:
            report[section.__name__] = _performed(section, machine)
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
    failed = [s.__name__ for s in sections if not report[s.__name__]["ok"]]
    print(f"{len(sections) - len(failed)} sections fine, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _performed(section: Callable[[Machine], dict[str, Any]], machine: Machine) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = section(machine)
    except Exception as error:
        found = {"ok": False, "error": repr(error), "traceback": traceback.format_exc()}
    found["seconds"] = round(time.perf_counter() - started, 1)
    print(f"{section.__name__:20} {'ok' if found['ok'] else 'FAILED':6} {found['seconds']} s")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
