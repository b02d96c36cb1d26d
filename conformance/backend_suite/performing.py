"""Performing checks: each on a fresh instance of the backend, with one of four outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from slotmirror.conformance.backend_suite.check import Check, Refused
from slotmirror.conformance.backend_suite.simulated_bench import SimulatedWorkbench
from slotmirror.conformance.backend_suite.workbench import Workbench
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.core.backend import DeviceBackend

Status: TypeAlias = Literal["passed", "failed", "refused", "deviation"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check; `detail` says why it did not pass."""

    check: Check
    status: Status
    detail: str
    seconds: float
    error: BaseException | None = None


def default_workbench(backend: DeviceBackend) -> Workbench:
    """The workbench for a backend that brings none of its own."""
    if isinstance(backend, SimulatedBackend):
        return SimulatedWorkbench(backend)
    return Workbench(backend)


def perform(
    check: Check, new_bench: Callable[[], Workbench], deviations: Mapping[str, str]
) -> Outcome:
    """Perform a check on a new workbench; never raises but `KeyboardInterrupt`."""
    started = time.perf_counter()

    def outcome(status: Status, detail: str, error: BaseException | None = None) -> Outcome:
        return Outcome(check, status, detail, time.perf_counter() - started, error)

    known = deviations.get(check.name)
    try:
        bench = new_bench()
        with quiet_core(), bench.active():
            check.run(bench)
        broken = bench.violations()
        if broken:
            raise AssertionError(f"the device saw its rules broken: {'; '.join(broken)}")
    except Refused as refusal:
        return outcome("refused", str(refusal))
    # Whatever the code under test throws is a result, SystemExit included.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if known is not None:
            return outcome("deviation", known)
        return outcome("failed", f"{type(error).__name__}: {error}", error)
    if known is not None:
        return outcome("failed", f"is listed as a deviation ({known}) but passes: unlist it")
    return outcome("passed", "")
