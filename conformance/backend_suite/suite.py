"""All checks, and the class by which pytest runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from slotmirror.conformance.backend_suite.cache_checks import CACHE_CHECKS
from slotmirror.conformance.backend_suite.check import Check
from slotmirror.conformance.backend_suite.copy_checks import COPY_CHECKS
from slotmirror.conformance.backend_suite.deviations import deviations_of
from slotmirror.conformance.backend_suite.fence_checks import FENCE_CHECKS
from slotmirror.conformance.backend_suite.host_checks import HOST_CHECKS
from slotmirror.conformance.backend_suite.identity_checks import IDENTITY_CHECKS
from slotmirror.conformance.backend_suite.performing import Outcome, default_workbench, perform
from slotmirror.conformance.backend_suite.slot_checks import SLOT_CHECKS
from slotmirror.conformance.backend_suite.state_machine import LIFE_CHECKS
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.core.backend import DeviceBackend
from slotmirror.core.errors import BackendUnavailable
from slotmirror.core.registry import load_backend

ALL_CHECKS: tuple[Check, ...] = (
    *IDENTITY_CHECKS,
    *FENCE_CHECKS,
    *HOST_CHECKS,
    *COPY_CHECKS,
    *SLOT_CHECKS,
    *CACHE_CHECKS,
    *LIFE_CHECKS,
)
CHECK_NAMES = frozenset(check.name for check in ALL_CHECKS)


class BackendConformance:
    """The kit as a test class: subclass it, name it `Test…`, and set `backend_name`.

    Override `new_backend` for a backend that needs arguments, `workbench` for a device that torch
    does not drive.
    """

    backend_name: ClassVar[str] = ""

    def new_backend(self) -> DeviceBackend:
        """A fresh instance; one is made for every check."""
        return load_backend(self.backend_name)

    def workbench(self, backend: DeviceBackend) -> Workbench:
        """How the kit computes on the backend's device."""
        return default_workbench(backend)

    def perform(self, check: Check) -> Outcome:
        """Perform one check; on a machine without the device it is refused."""
        try:
            backend = self.new_backend()
        except BackendUnavailable as error:
            return Outcome(check, "refused", str(error), 0.0)
        known = deviations_of(type(backend), CHECK_NAMES)
        return perform(check, lambda: self.workbench(backend), known)


def _as_test(check: Check) -> Callable[[BackendConformance], None]:
    """The check as a test method, with pytest's own words for what is no failure."""

    def test(self: BackendConformance) -> None:
        outcome = self.perform(check)
        if outcome.status in ("refused", "deviation"):
            import pytest

            tell = pytest.skip if outcome.status == "refused" else pytest.xfail
            tell(outcome.detail)
        if outcome.status == "failed":
            raise AssertionError(outcome.detail) from outcome.error

    test.__name__ = f"test_{check.name}"
    test.__doc__ = check.text
    return test


for _check in ALL_CHECKS:
    setattr(BackendConformance, f"test_{_check.name}", _as_test(_check))
