"""``core/`` names no accelerator or engine, and leaves threads and clocks to two files."""

from __future__ import annotations

import pytest

from support.import_checks import reserved_imports
from support.name_checks import vendor_names
from support.source_tree import ROOT, python_files

ACCELERATORS = {
    *("amd", "ascend", "cann", "cuda", "cudnn", "gaudi", "hccl", "hip", "hpu", "intel", "mlu"),
    *("mps", "musa", "nccl", "npu", "nvidia", "rocm", "xpu"),
}
ENGINES = {"omni", "sglang", "vllm"}
VENDORS = frozenset(ACCELERATORS | ENGINES)

_THREADS = {"core/committer.py", "core/runtime.py"}
ONLY_IN = {
    "_thread": _THREADS,
    "asyncio": _THREADS,
    "concurrent": _THREADS,
    "multiprocessing": _THREADS,
    "threading": _THREADS,
    "time": {"core/runtime.py"},
}

PLANTED_VENDORS = [
    "import torch_npu",
    "from torch import cuda",
    "stream = torch.cuda.current_stream()",
    "class CudaStream: ...",
    "def on_xpu(): ...",
    "f(nvidia_device=1)",
    "if device == 'npu:0': pass",
    "message = f'{name} needs ROCm'",
    "def f(hip): ...",
    "global HIP2",
]

INNOCENT = [
    '"""Docstring: vLLM issue 1, torch.cuda.Event."""',
    "x = 1\n'''attribute docstring about Ascend'''",
    "input = ownership = relationship = ramps = 1",
    "# a comment may cite CUDA",
]


def _in_core(check, *arguments):
    return [
        violation
        for path in python_files(ROOT / "core")
        for violation in check(
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), *arguments
        )
    ]


def test_core_names_no_vendor():
    """No identifier, attribute, import or text constant in core/ holds a vendor's name."""
    assert _in_core(vendor_names, VENDORS) == []


@pytest.mark.parametrize("source", PLANTED_VENDORS)
def test_a_planted_vendor_name_is_caught(source):
    """A vendor is found in every kind of node that can hold a name."""
    assert vendor_names("x.py", source, VENDORS) != []


@pytest.mark.parametrize("source", INNOCENT)
def test_a_citation_or_a_longer_word_passes(source):
    """Docstrings, comments and words that merely contain the letters are no violations."""
    assert vendor_names("x.py", source, VENDORS) == []


def test_core_reaches_threads_and_clocks_through_two_files():
    """Only committer.py and runtime.py import threads, only runtime.py a clock."""
    assert _in_core(reserved_imports, ONLY_IN) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/oplog.py", "import threading"),
        ("core/manager.py", "from concurrent.futures import Future"),
        ("core/committer.py", "def f():\n    from time import monotonic"),
        ("core/inner/runtime.py", "import threading"),
    ],
)
def test_a_planted_thread_or_clock_is_caught(path, source):
    """The report names the files that may import it; a namesake elsewhere is not one of them."""
    [violation] = reserved_imports(path, source, ONLY_IN)
    assert "core/runtime.py alone" in violation


def test_the_two_files_may_import_them():
    """runtime.py may import both, committer.py threads."""
    assert reserved_imports("core/runtime.py", "import threading, time", ONLY_IN) == []
    assert reserved_imports("core/committer.py", "import threading", ONLY_IN) == []
