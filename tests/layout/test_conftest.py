"""The settings and checks that tests/conftest.py gives every test, seen from outside."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.source_tree import ROOT

PLANTED = """
import os
import threading

release = threading.Event()


def test_leaves_a_thread():
    threading.Thread(target=release.wait, name="slotmirror-planted", daemon=True).start()


def test_the_former_thread_is_not_mine():
    assert threading.active_count() > 1


def test_joins_its_thread():
    release.set()
    thread = threading.Thread(target=release.wait, name="slotmirror-joined")
    thread.start()
    thread.join()


def test_leaves_a_foreign_thread():
    threading.Thread(target=threading.Event().wait, name="library", daemon=True).start()


def test_does_not_see_the_hash_seed_of_the_shell():
    assert "PYTHONHASHSEED" not in os.environ
"""


def test_a_planted_thread_fails_its_own_test_alone(tmp_path):
    """The test that leaves a slotmirror thread fails and names it; its neighbours pass.

    The hash seed of the calling shell reaches none of them.
    """
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "threads left behind: slotmirror-planted" in done.stdout
    assert "ERROR test_planted.py::test_leaves_a_thread" in done.stdout
    assert "5 passed, 1 error" in done.stdout


def test_torch_runs_on_one_thread():
    """The thread count is set before torch is imported, so sums have one order."""
    import torch

    assert torch.get_num_threads() == 1


def test_stevedore_reads_and_writes_no_cache_file():
    """stevedore looks into a private folder, does not write to it, and finds nothing there."""
    from stevedore import _cache

    assert _cache._c._disable_caching
    _cache.get_group_all("slotmirror.backends")
    assert [path.name for path in Path(_cache._c._dir).iterdir()] == [".disable"]
