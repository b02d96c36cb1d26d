"""What every test needs: one torch thread, no foreign settings, no thread left behind."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# Settings of the caller's shell that would change a result.
_FOREIGN_SETTINGS = ("PYTHONHASHSEED", "SLOTMIRROR_BACKEND")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module, hence before torch and stevedore read the environment."""
    for name in _FOREIGN_SETTINGS:
        os.environ.pop(name, None)
    # torch takes its thread count from here when it is first imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    folder = tempfile.TemporaryDirectory(prefix="slotmirror-tests-")
    config.add_cleanup(folder.cleanup)
    _disable_stevedore_cache(Path(folder.name))


def _disable_stevedore_cache(cache_home: Path) -> None:
    """An empty cache folder of our own: with ``.disable`` alone old files are still read.

    stevedore 5.10 keys its files by modification times with minutes of rounding and so serves
    a stale list of entry points after an install. Subprocesses inherit the setting.
    """
    folder = cache_home / "python-entrypoints"
    folder.mkdir()
    (folder / ".disable").touch()
    os.environ["XDG_CACHE_HOME"] = str(cache_home)


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fails a test that ends while a thread named ``slotmirror...`` it started still runs."""
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("slotmirror")
    ]
    if left:
        pytest.fail(f"threads left behind: {', '.join(sorted(left))}", pytrace=False)
