"""Discovery of device backends through stevedore (backends spec, section 4).

Listing reads entry-point metadata and imports nothing; exactly one backend is then loaded. Asking
by name fails hard; the automatic choice keeps the reason for each candidate that it passed over.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch
from stevedore.driver import DriverManager
from stevedore.exception import NoMatches

from slotmirror.core.backend import API_VERSION, DeviceBackend, Probe
from slotmirror.core.errors import (
    BackendAmbiguous,
    BackendLoadError,
    BackendNotFound,
    BackendUnavailable,
)

NAMESPACE = "slotmirror.backends"
ENVIRONMENT_VARIABLE = "SLOTMIRROR_BACKEND"


@dataclass(frozen=True, slots=True)
class InstalledBackend:
    """An entry point of the namespace; nothing of it has been imported."""

    name: str
    target: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One installed backend and what its probe said; for `slotmirror backends`."""

    installed: InstalledBackend
    automatic: bool
    probe: Probe


def list_backends() -> list[InstalledBackend]:
    """Every installed backend, by name; imports none of them.

    Raises `BackendAmbiguous` if two distributions offer the same name.
    """
    found = [
        InstalledBackend(entry.name, entry.value, entry.dist.name, entry.dist.version)
        for entry in sorted(entry_points(group=NAMESPACE), key=lambda entry: entry.name)
        if entry.dist is not None  # never None where metadata was read
    ]
    counts = Counter(backend.name for backend in found)
    twice = [f"{one.name} of {one.distribution}" for one in found if counts[one.name] > 1]
    if twice:
        text = f"a backend name is offered more than once: {', '.join(twice)}: uninstall one"
        raise BackendAmbiguous(text, twice)
    return found


def backend_class(name: str) -> type[DeviceBackend]:
    """Load the class of one backend; neither probes nor instantiates it.

    Raises `BackendNotFound`, or `BackendLoadError` with whatever its module threw.
    """
    installed = {backend.name: backend for backend in list_backends()}
    if name not in installed:
        raise BackendNotFound(name, list(installed))
    distribution = installed[name].distribution
    try:
        manager: DriverManager[object] = DriverManager(
            NAMESPACE, name, on_load_failure_callback=_raise
        )
        # `manager.driver` would give the class itself where an object is falsy.
        loaded: object = manager.extensions[0].plugin
    except KeyboardInterrupt:
        raise
    except NoMatches as error:
        reason = (
            "installed according to its metadata, but unknown to stevedore, whose on-disk cache "
            f"(python-entrypoints in the user's cache folder) may be stale: {error}"
        )
        raise BackendLoadError(name, distribution, reason) from error
    # A plugin's module can throw anything while it is imported, SystemExit and AssertionError too.
    except BaseException as error:
        raise BackendLoadError(name, distribution, f"{type(error).__name__}: {error}") from error
    if isinstance(loaded, type) and issubclass(loaded, DeviceBackend):
        return loaded
    raise BackendLoadError(name, distribution, f"{loaded!r} is not a subclass of DeviceBackend")


def report_backends() -> list[BackendReport]:
    """Probe every installed backend; one that fails to load is reported, never raised."""
    return [_report(backend) for backend in list_backends()]


def load_backend(name: str | None = None, device: torch.device | None = None) -> DeviceBackend:
    """The backend to use: `name`, else the environment's `SLOTMIRROR_BACKEND`, else automatic.

    A named backend that cannot serve raises `BackendUnavailable`. The automatic choice takes the
    one accelerator that is available, the host reference if there is none, and raises
    `BackendAmbiguous` if there are several.
    """
    name = name or os.environ.get(ENVIRONMENT_VARIABLE) or _choose()
    loaded = backend_class(name)
    probe = _checked_probe(name, loaded)
    if not probe.available:
        raise BackendUnavailable(name, probe.reason)
    return loaded(device)


def _raise(_manager: object, _entry_point: object, error: BaseException) -> None:
    raise error


def _checked_probe(name: str, loaded: type[DeviceBackend]) -> Probe:
    if loaded.api_version != API_VERSION:
        reason = f"it speaks interface version {loaded.api_version}, this core {API_VERSION}"
    elif loaded.name != name:
        reason = f"its class calls itself {loaded.name!r}, its entry point {name!r}"
    else:
        try:
            return loaded.probe()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = f"its probe raised {type(error).__name__}: {error}"
    return Probe(available=False, reason=reason)


def _report(installed: InstalledBackend) -> BackendReport:
    try:
        loaded = backend_class(installed.name)
    except BackendLoadError as error:
        return BackendReport(installed, False, Probe(available=False, reason=error.reason))
    return BackendReport(installed, loaded.automatic, _checked_probe(installed.name, loaded))


def _choose() -> str:
    reports = report_backends()
    usable = [one.installed.name for one in reports if one.automatic and one.probe.available]
    names = [name for name in usable if backend_class(name).accelerator] or usable
    if len(names) == 1:
        return names[0]
    if names:
        mend = f"choose one with {ENVIRONMENT_VARIABLE} or by name"
        raise BackendAmbiguous(f"several backends could serve: {', '.join(names)}; {mend}", names)
    reasons = [
        f"{one.installed.name}: "
        + ("only on request, by name" if one.probe.available else one.probe.reason)
        for one in reports
    ]
    nothing = f"nothing is installed under {NAMESPACE}"
    raise BackendUnavailable("automatic", "; ".join(reasons) or nothing)
