"""The device script without a device: every section runs, and failures are reported."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest
import torch

from support.source_tree import ROOT
from support.stand_in.backends import StandInCuda, StandInNpu
from support.stand_in.bench import StandInWorkbench

MEASUREMENTS = ["bandwidth", "overlap", "decode_step", "direct_capture", "capture_elsewhere",
                "page_locked_bytes"]  # fmt: skip


@pytest.fixture
def script() -> types.ModuleType:
    """The script as a module."""
    path = ROOT / "tests" / "device" / "run_device_checks.py"
    spec = importlib.util.spec_from_file_location("run_device_checks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: types.ModuleType, folder: Path, *arguments: str) -> tuple[int, dict[str, dict]]:
    """The exit code and the report."""
    file = folder / "device.json"
    code = script.main(["--quick", "--json", str(file), *arguments])
    return code, json.loads(file.read_text(encoding="utf-8"))


def test_every_section_runs_on_the_reference(script: types.ModuleType, tmp_path: Path) -> None:
    """Sections that need a device say so; none fails."""
    code, report = run(script, tmp_path, "--backend", "cpu_ref", "--only", *MEASUREMENTS)
    assert code == 0, report
    assert report["direct_capture"]["refused"].startswith("copies are synchronous")
    assert report["capture_elsewhere"]["refused"] == "no graphs on cpu"
    assert report["bandwidth"]["pageable_gb_s"].keys() == {"8192", "131072", "1048576"}
    assert report["torch"] == str(torch.__version__)
    assert report["overlap"]["timeline_ms"]["unavailable"].startswith("no timing events: ")


@pytest.mark.parametrize("backend", [StandInCuda, StandInNpu])
def test_the_measuring_sections_run_on_an_asynchronous_device(
    script: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: type[StandInCuda] | type[StandInNpu],
) -> None:
    """Over the stand-in, whose times mean nothing but whose copies are asynchronous."""
    instance = backend()
    monkeypatch.setattr(script, "load_backend", lambda name: instance)
    monkeypatch.setattr(script, "default_workbench", StandInWorkbench)
    with instance.mode:
        _, report = run(script, tmp_path, "--backend", backend.name, "--only", *MEASUREMENTS)
    assert [name for name in MEASUREMENTS if "error" in report[name]] == []
    assert report["page_locked_bytes"]["reserved_bytes"] == 4 << 20
    assert report["decode_step"]["save_outputs_us"] > 0
    assert "crossover_rows" in report["direct_capture"]


def test_the_timeline_counts_from_its_first_mark(
    script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of the device's own module, recorded on the stream that is asked about."""
    now = [7.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            self.stream, self.ms = stream, now[0]

        def elapsed_time(self, later: Event) -> float:
            return later.ms - self.ms

    monkeypatch.setattr(torch, "xpu", types.SimpleNamespace(Event=Event))
    timeline = script.Timeline(torch.device("xpu"))
    for name, at_ms in (("compute starts", 7.0), ("copy starts", 7.5), ("copy ends", 19.0)):
        now[0] = at_ms
        timeline.mark(name, "a stream")
    assert timeline.ms() == {"compute starts": 0.0, "copy starts": 0.5, "copy ends": 12.0}


def test_the_link_is_read_from_the_bus(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PCIe 5 with 16 lanes carries 63 GB/s; a device without a place on the bus has none."""
    place = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    assert script.link_gb_s(torch.device("cuda", 0), tmp_path) is None
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("16\n")
    assert script.link_gb_s(torch.device("cuda", 0), tmp_path) == pytest.approx(63.0, abs=0.1)
    (folder / "max_link_speed").write_text("Unknown\n")
    assert script.link_gb_s(torch.device("cuda", 0), tmp_path) is None
    assert script.link_gb_s(torch.device("cpu"), tmp_path) is None


def test_a_failing_section_is_reported_and_the_others_run(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the error and its traceback in the file."""

    def overlap(machine: object) -> dict[str, object]:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(script, "SECTIONS", (overlap, script.page_locked_bytes))
    code, report = run(script, tmp_path, "--backend", "cpu_ref")
    assert code == 1
    assert report["overlap"]["error"] == "RuntimeError('the device fell off the bus')"
    assert "Traceback" in report["overlap"]["traceback"]
    assert report["page_locked_bytes"]["ok"] is True


def test_sections_without_time_left_are_failures(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script ends within its budget and does not claim what it has not measured."""
    monkeypatch.setattr(script, "BUDGET_S", -1)
    code, report = run(script, tmp_path, "--backend", "cpu_ref", "--only", "bandwidth")
    assert code == 1
    assert report["bandwidth"] == {"ok": False, "error": "no time was left"}
