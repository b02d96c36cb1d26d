"""Only a chosen npu backend imports torch_npu, guarded, and leaves the environment as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotmirror.backends.npu import NpuBackend
from slotmirror.backends.npu.torch_npu_import import AUTOLOAD, import_torch_npu
from slotmirror.core.errors import BackendUnavailable


@pytest.fixture(autouse=True)
def _forget_torch_npu() -> Iterator[None]:
    """No test's torch_npu is another's."""
    yield
    sys.modules.pop("torch_npu", None)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A torch_npu whose import does what `source` says."""
    (folder / "torch_npu.py").write_text(f"import os\n{source}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("former", [None, "0", "1"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_autoload_variable_is_off_meanwhile_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: str | None, fails: bool
) -> None:
    """torch_npu sets it itself, and leaves it set when its import fails half-way."""
    if former is None:
        monkeypatch.delenv(AUTOLOAD, raising=False)
    else:
        monkeypatch.setenv(AUTOLOAD, former)
    body = f"seen = os.environ[{AUTOLOAD!r}]\nos.environ[{AUTOLOAD!r}] = 'changed'"
    install(tmp_path, monkeypatch, body + ("\nraise ImportError('libhccl.so')" if fails else ""))
    if fails:
        with pytest.raises(BackendUnavailable, match=r"ImportError: libhccl\.so"):
            import_torch_npu()
    else:
        assert import_torch_npu().seen == "0"
    assert os.environ.get(AUTOLOAD) == former


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('libascendcl.so: no such file')", "ImportError: libascendcl.so"),
        ("raise SystemExit('vendor exit')", "SystemExit: vendor exit"),
        ("raise AssertionError('vendor assert')", "AssertionError: vendor assert"),
        ("raise RuntimeError('two accelerators')", "RuntimeError: two accelerators"),
    ],
)
def test_a_failing_import_is_unavailable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    """Whatever torch_npu throws; the process goes on."""
    install(tmp_path, monkeypatch, source)
    with pytest.raises(BackendUnavailable, match=f"torch_npu cannot be imported: {reason}"):
        NpuBackend()


def test_the_users_interrupt_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it loads is not a reason."""
    install(tmp_path, monkeypatch, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        NpuBackend()
