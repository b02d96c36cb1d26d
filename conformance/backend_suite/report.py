"""One run of the whole kit as data."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version

import numpy as np
import torch

from slotmirror.conformance.backend_suite.performing import Outcome
from slotmirror.conformance.backend_suite.suite import ALL_CHECKS, BackendConformance
from slotmirror.core.backend import Capabilities, Probe
from slotmirror.core.registry import InstalledBackend, backend_class, list_backends


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What the kit found out about one installed backend."""

    installed: InstalledBackend
    probe: Probe
    capabilities: Capabilities
    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> Counter[str]:
        """Checks by status."""
        return Counter(outcome.status for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether nothing failed, and something passed."""
        return not self.counts["failed"] and bool(self.counts["passed"])

    def as_json(self) -> dict[str, object]:
        """For machines: versions, capabilities, counts, every check."""
        return {
            "backend": asdict(self.installed),
            "versions": {
                "python": platform.python_version(),
                "slotmirror": version("slotmirror"),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                **self.probe.versions,
            },
            "devices": list(self.probe.devices),
            "capabilities": asdict(self.capabilities),
            "ok": self.ok,
            **{status: self.counts[status] for status in _STATUSES},
            "checks": [
                {
                    "name": outcome.check.name,
                    "status": outcome.status,
                    "detail": outcome.detail,
                    "seconds": round(outcome.seconds, 3),
                }
                for outcome in self.outcomes
            ],
        }


_STATUSES = ("passed", "failed", "refused", "deviation")


def report_on(name: str, progress: Callable[[Outcome], None] | None = None) -> ConformanceReport:
    """Run the kit on an installed backend.

    Raises the registry's errors: not installed, not loadable, or not available on this machine.
    """

    class Named(BackendConformance):
        backend_name = name

    suite = Named()
    backend = suite.new_backend()
    [installed] = [found for found in list_backends() if found.name == name]
    outcomes = []
    for check in ALL_CHECKS:
        outcomes.append(suite.perform(check))
        if progress is not None:
            progress(outcomes[-1])
    return ConformanceReport(
        installed, backend_class(name).probe(), backend.capabilities, tuple(outcomes)
    )
