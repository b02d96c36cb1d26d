"""The npu probe reads what lies around; torch_npu is never imported by it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slotmirror.backends.npu import NpuBackend, probe
from slotmirror.core.backend import Probe

TORCH = str(torch.__version__)
RELEASE = TORCH.partition("+")[0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without anything of Ascend's."""
    return Machine(tmp_path, monkeypatch)


class Machine:
    """Folders and variables that the probe looks at, in a test's hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.devices, self.cann = folder / "dev", folder / "cann"
        self.devices.mkdir()
        monkeypatch.setattr(probe, "DEVICE_FOLDER", self.devices)
        monkeypatch.setattr(probe, "LOADER_CACHE", folder / "ld.so.cache")
        for name in ("LD_LIBRARY_PATH", *probe._CANN_HOMES, "ASCEND_RT_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    def install_torch_npu(self, requires: str = f"torch=={RELEASE}.*") -> None:
        """A distribution whose module ends the process when it is imported."""
        site = self.folder / "site"
        (site / "torch_npu").mkdir(parents=True)
        (site / "torch_npu" / "__init__.py").write_text("import os\nos._exit(9)\n")
        info = site / "torch_npu-9.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9.0\nRequires-Dist: {requires}\n"
        )
        self.monkeypatch.syspath_prepend(str(site))

    def install_cann(self) -> None:
        """The runtime's library, on the loader's path."""
        self.cann.mkdir()
        (self.cann / "libascendcl.so").touch()
        self.monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{self.cann}")

    def install_driver(self, devices: int = 2) -> None:
        """The driver's device files."""
        for name in ("davinci_manager", "devmm_svm", *(f"davinci{i}" for i in range(devices))):
            (self.devices / name).touch()

    def probe(self) -> Probe:
        """What the backend says; torch_npu must not have been imported for it."""
        found = NpuBackend.probe()
        assert "torch_npu" not in sys.modules
        return found

    def obstacle(self) -> str:
        """Why it cannot serve."""
        found = self.probe()
        assert found.available is False
        assert found.devices == ()
        return found.reason


def test_a_machine_with_everything_is_available(machine: Machine) -> None:
    """Devices by torch's names, and the versions that have to fit."""
    machine.install_torch_npu()
    machine.install_cann()
    machine.install_driver()
    found = machine.probe()
    assert found.available, found.reason
    assert found.devices == ("npu:0", "npu:1")
    assert found.versions == {"torch": TORCH, "torch_npu": "9.9.0"}


def test_torch_npu_is_an_extra(machine: Machine) -> None:
    """Without it the reason is the command that installs it."""
    assert machine.obstacle() == "torch_npu is not installed: pip install 'slotmirror[npu]'"


def test_torch_npu_pins_one_torch(machine: Machine) -> None:
    """Both versions are named; the metadata alone is read."""
    machine.install_torch_npu("torch==2.1.0")
    reason = machine.obstacle()
    assert reason == f"torch_npu 9.9.0 is built for torch 2.1.0, this is {TORCH}"


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        (f"torch=={RELEASE}.*", True),
        (f"torch (=={RELEASE})", True),
        (f"torch == {RELEASE}", True),
        (f"torch=={RELEASE.rpartition('.')[0]}.*", True),
        (f"torch=={RELEASE}1", False),
        ("torch>=2.1", True),
        ("torchvision==0.1", True),
    ],
)
def test_every_spelling_of_the_pin_is_read(machine: Machine, requires: str, fits: bool) -> None:
    """No pin is no obstacle; another package's pin is none of torch's."""
    machine.install_torch_npu(requires)
    assert ("is built for torch" not in machine.obstacle()) == fits


def test_without_cann_torch_npu_is_not_imported(machine: Machine) -> None:
    """Its import would fail on a shared library and take the process's torch with it."""
    machine.install_torch_npu()
    machine.install_driver()
    assert machine.obstacle() == (
        "CANN is missing: libascendcl.so is on no library path; source its set_env.sh"
    )


def toolkit_home(machine: Machine) -> None:
    (machine.folder / "home" / "lib64").mkdir(parents=True)
    (machine.folder / "home" / "lib64" / "libascendcl.so").touch()
    machine.monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(machine.folder / "home"))


def loader_cache(machine: Machine) -> None:
    (machine.folder / "ld.so.cache").write_bytes(b"\0libc.so.6\0libascendcl.so\0")


@pytest.mark.parametrize("install", [Machine.install_cann, toolkit_home, loader_cache])
def test_the_runtime_is_found_where_the_loader_finds_it(
    machine: Machine, install: Callable[[Machine], None]
) -> None:
    """Search path, CANN's own variable, or the loader's cache."""
    machine.install_torch_npu()
    machine.install_driver()
    install(machine)
    assert machine.probe().available


def test_without_the_driver_there_is_no_device(machine: Machine) -> None:
    """A container needs its device files passed in."""
    machine.install_torch_npu()
    machine.install_cann()
    assert machine.obstacle().startswith("the driver is missing: no ")
    assert machine.obstacle().endswith("davinci_manager")


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,1,5", 3), ("", 0)])
def test_hidden_devices_do_not_count(machine: Machine, visible: str, count: int) -> None:
    """`ASCEND_RT_VISIBLE_DEVICES` renumbers from 0; with none visible the reason says so."""
    machine.install_torch_npu()
    machine.install_cann()
    machine.install_driver()
    machine.monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    found = machine.probe()
    assert found.devices == tuple(f"npu:{i}" for i in range(count))
    assert ("no device is visible" in found.reason) == (count == 0)


def test_torch_npu_refuses_to_load_beside_another_accelerator(machine: Machine) -> None:
    """A torch built for another device is named before torch_npu is looked for."""
    found = types.SimpleNamespace(type="cuda")
    machine.monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    machine.install_torch_npu()
    assert "is built for cuda; torch_npu needs the CPU build" in machine.obstacle()


def test_another_private_backend_in_torchs_one_place_is_named(machine: Machine) -> None:
    """torch has one place for a device package."""
    machine.monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "gadget")
    machine.install_torch_npu()
    assert machine.obstacle() == "torch's one place for a device package is taken by 'gadget'"


def test_a_loaded_torch_npu_needs_no_second_look(machine: Machine) -> None:
    """The engine imported it: only devices are still asked for."""
    machine.monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    machine.install_driver(devices=1)
    assert machine.probe().devices == ("npu:0",)


def test_whatever_is_raised_becomes_the_reason(machine: Machine) -> None:
    """Broken metadata, unreadable folders: never an exception."""
    machine.monkeypatch.setattr(probe, "find_spec", lambda name: 1 / 0)
    machine.install_torch_npu()
    assert "cannot tell: ZeroDivisionError" in machine.obstacle()
