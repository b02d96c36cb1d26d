"""What every benchmark needs: clocks of threads, hand-offs, quantiles, the machine."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

PAGE_BYTES = resource.getpagesize()


def median_us(seconds: Sequence[float]) -> float:
    """Median of times in seconds, as microseconds."""
    return statistics.median(seconds) * 1e6


def low_us(seconds: Sequence[float]) -> float:
    """The tenth percentile, as microseconds: what the call takes when nobody disturbs it."""
    return float(np.quantile(np.asarray(seconds), 0.1)) * 1e6


def cpu_s_of(thread: threading.Thread) -> float:
    """CPU seconds of a live thread, read from any other; nothing is traced."""
    if thread.ident is None:
        raise ValueError(f"{thread.name} was not started")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def times_blocked() -> int:
    """How often the calling thread has given up its core to wait: for the GIL, a lock, a page."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def times_preempted() -> int:
    """How often the system took the core from the calling thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def resident_bytes() -> int:
    """Memory of this process that is backed by pages now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def machine() -> dict[str, object]:
    """Where a result was measured, load included: a busy machine's figures are worth less."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "transparent_huge_pages": _huge_pages(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _huge_pages() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return "none"
    return setting.read_text().partition("[")[2].partition("]")[0]
