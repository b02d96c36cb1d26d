"""Discovery of backends (backends spec, section 4)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from stevedore.extension import ExtensionManager

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.errors import (
    BackendAmbiguous,
    BackendLoadError,
    BackendNotFound,
    BackendUnavailable,
)
from slotmirror.core.registry import backend_class, list_backends, load_backend, report_backends

PLUGIN = """
from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.backend import Probe
class Plugin(CpuRefBackend):
    name = "{name}"
    accelerator = True
    {body}
"""


@pytest.fixture(autouse=True)
def _fresh_discovery(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice from outside; stevedore remembers entry points per process, so it must forget."""
    monkeypatch.delenv("SLOTMIRROR_BACKEND", raising=False)
    ExtensionManager.ENTRY_POINT_CACHE.clear()
    yield
    ExtensionManager.ENTRY_POINT_CACHE.clear()


class Site:
    """A folder of installed plugin distributions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def install(self, distribution: str, name: str, source: str) -> None:
        """Put a module and its metadata where import and importlib.metadata find them."""
        module = distribution.replace("-", "_")
        self._monkeypatch.delitem(sys.modules, module, raising=False)
        (self._folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self._folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[slotmirror.backends]\n{name} = {module}:Plugin\n")
        self._monkeypatch.syspath_prepend(str(self._folder))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty site folder at the head of sys.path."""
    return Site(tmp_path, monkeypatch)


def plugin(name: str, body: str = "automatic = True") -> str:
    """The source of a plugin that serves like cpu_ref."""
    return PLUGIN.format(name=name, body=body)


def test_cpu_ref_is_found_through_stevedore_and_chosen_without_accelerators() -> None:
    """Listing names distribution and version; the automatic choice is the host reference."""
    listed = {backend.name: backend for backend in list_backends()}
    assert listed["cpu_ref"].distribution == "slotmirror"
    assert listed["cpu_ref"].version == "0.1.0"
    assert type(load_backend()) is CpuRefBackend
    assert type(load_backend("cpu_ref")) is CpuRefBackend


def test_an_unknown_name_fails_hard_and_lists_what_is_installed() -> None:
    """By argument and by environment variable alike."""
    with pytest.raises(BackendNotFound, match=r"no backend 'tpu'; installed: .*cpu_ref") as caught:
        load_backend("tpu")
    assert "cpu_ref" in caught.value.installed


def test_the_environment_variable_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SLOTMIRROR_BACKEND` counts when no name is given."""
    monkeypatch.setenv("SLOTMIRROR_BACKEND", "nowhere")
    with pytest.raises(BackendNotFound, match="'nowhere'"):
        load_backend()
    assert load_backend("cpu_ref").name == "cpu_ref"


def test_listing_imports_nothing(site: Site) -> None:
    """A plugin whose module cannot even be parsed is listed."""
    site.install("broken-plugin", "broken", "this is not python")
    assert "broken" in [backend.name for backend in list_backends()]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('vendor exit')", "SystemExit: vendor exit"),
        ("raise AssertionError('vendor assert')", "AssertionError: vendor assert"),
        ("Plugin = 3", "3 is not a subclass of DeviceBackend"),
        ("", "AttributeError"),
    ],
)
def test_a_plugin_that_fails_to_load_breaks_nobody_else(
    site: Site, source: str, reason: str
) -> None:
    """Named: `BackendLoadError` with distribution and reason. Reported: unavailable, and why."""
    site.install("bad-plugin", "bad", source)
    with pytest.raises(BackendLoadError, match=f"backend 'bad' of bad-plugin.*{reason}"):
        load_backend("bad")
    reports = {report.installed.name: report for report in report_backends()}
    assert not reports["bad"].probe.available
    assert reason in reports["bad"].probe.reason
    assert reports["cpu_ref"].probe.available
    assert load_backend().name == "cpu_ref"


def test_keyboard_interrupt_is_never_swallowed(site: Site) -> None:
    """The user's interrupt passes through a plugin's import."""
    site.install("slow-plugin", "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        backend_class("slow")


def test_an_available_accelerator_is_chosen_before_cpu_ref(site: Site) -> None:
    """Exactly one: it is taken."""
    site.install("gadget-plugin", "gadget", plugin("gadget"))
    assert load_backend().name == "gadget"


def test_two_available_accelerators_are_an_error_that_lists_them(site: Site) -> None:
    """Neither is guessed."""
    site.install("one-plugin", "one", plugin("one"))
    site.install("two-plugin", "two", plugin("two"))
    with pytest.raises(BackendAmbiguous, match="one, two; choose one with SLOTMIRROR_BACKEND"):
        load_backend()


def test_backends_that_are_not_automatic_serve_only_by_name(site: Site) -> None:
    """`automatic = False` keeps a backend out of the choice."""
    site.install("shy-plugin", "shy", plugin("shy", "automatic = False"))
    assert load_backend().name == "cpu_ref"
    assert load_backend("shy").name == "shy"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("api_version = 99", "it speaks interface version 99, this core 1"),
        (
            "probe = classmethod(lambda cls: Probe(available=False, reason='no driver'))",
            "no driver",
        ),
        ("probe = classmethod(lambda cls: 1 / 0)", "its probe raised ZeroDivisionError"),
    ],
)
def test_a_named_backend_that_cannot_serve_is_unavailable_with_its_reason(
    site: Site, body: str, reason: str
) -> None:
    """A foreign interface version, a negative probe, a probe that raises."""
    site.install("odd-plugin", "odd", plugin("odd", body))
    with pytest.raises(BackendUnavailable, match=f"backend 'odd' is unavailable: {reason}"):
        load_backend("odd")


def test_an_entry_point_must_carry_its_class_name(site: Site) -> None:
    """The entry-point name equals the backend's `name`."""
    site.install("alias-plugin", "alias", plugin("original"))
    with pytest.raises(BackendUnavailable, match="itself 'original', its entry point 'alias'"):
        load_backend("alias")


def test_one_name_from_two_distributions_is_an_error(site: Site) -> None:
    """Both distributions are named."""
    site.install("first-plugin", "same", plugin("same"))
    site.install("second-plugin", "same", plugin("same"))
    with pytest.raises(BackendAmbiguous, match=r"same of first-plugin.*same of second-plugin"):
        load_backend("cpu_ref")


def test_when_nothing_is_available_every_reason_is_given(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automatic choice says why each candidate was passed over."""
    site.install("shy-plugin", "shy", plugin("shy", "automatic = False"))
    site.install("torn-plugin", "torn", "raise OSError('no driver')")
    monkeypatch.setattr(CpuRefBackend, "automatic", False)
    only = "only on request"
    with pytest.raises(
        BackendUnavailable, match=f"cpu_ref: {only}.*shy: {only}.*torn: OSError: no driver"
    ):
        load_backend()
