"""The conformance kit on every backend that this machine can run."""

from __future__ import annotations

import pytest

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.backend_suite.suite import BackendConformance
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.simulated import PROFILES, SimulatedBackend
from slotmirror.core.backend import DeviceBackend
from support.stand_in.backends import OnStandIn, StandInCuda, StandInNpu, StandInTorch
from support.stand_in.bench import StandInWorkbench


class TestCpuRef(BackendConformance):
    """The reference, found by its name."""

    backend_name = "cpu_ref"


@pytest.mark.parametrize("backend", [CpuRefBackend])
def test_the_reference_is_what_its_name_finds(backend: type[DeviceBackend]) -> None:
    """The kit ran on the class that this repository ships."""
    assert type(TestCpuRef().new_backend()) is backend


class OnSimulated(BackendConformance):
    """A profile of the simulated device."""

    profile = "plain"
    test_the_probe_has_no_side_effects = None  # one profile asks for all: it is one class
    test_the_probe_survives_hidden_devices = None

    def new_backend(self) -> DeviceBackend:
        return SimulatedBackend(profile=PROFILES[self.profile])


class TestSimulatedPlain(OnSimulated):
    test_the_probe_has_no_side_effects = BackendConformance.test_the_probe_has_no_side_effects


class TestSimulatedUnpinned(OnSimulated):
    profile = "unpinned"


class TestSimulatedAligned(OnSimulated):
    profile = "aligned"


class TestSimulatedSynchronous(OnSimulated):
    profile = "synchronous"


class TestSimulatedSlow(OnSimulated):
    profile = "slow"


def test_every_profile_is_under_test() -> None:
    """A new profile of the simulated device needs a class here."""
    assert {cls.profile for cls in OnSimulated.__subclasses__()} == set(PROFILES)


class WithoutHardware(BackendConformance):
    """A shipped backend over a stand-in of the module that it drives."""

    backend: type[OnStandIn]

    def new_backend(self) -> OnStandIn:
        return self.backend()

    def workbench(self, backend: DeviceBackend) -> Workbench:
        assert isinstance(backend, OnStandIn)
        return StandInWorkbench(backend)


class TestCudaOverItsStandIn(WithoutHardware):
    backend = StandInCuda


class TestNpuOverItsStandIn(WithoutHardware):
    backend = StandInNpu


class TestTorchOverItsStandIn(WithoutHardware):
    backend = StandInTorch
