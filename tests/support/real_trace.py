"""The published trace, where the environment names its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL_TRACE_NAME = "mooncake_conversation_trace.jsonl"


def real_trace() -> Path:
    """Path of the published trace; skips the test where no folder is named."""
    folder = os.environ.get("SLOTMIRROR_TRACE_DIR")
    if not folder:
        pytest.skip(f"SLOTMIRROR_TRACE_DIR is not set: it names the folder of {REAL_TRACE_NAME}")
    return Path(folder) / REAL_TRACE_NAME
