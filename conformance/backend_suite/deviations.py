"""Known deviations of a backend: a reviewed file beside it, not conditions in the checks.

`conformance_deviations.txt` in the folder of the backend's module has lines `check: reason`. A
check named there must fail; one that passes is reported, so that the list cannot outlive its
reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.errors import ConfigError

FILE_NAME = "conformance_deviations.txt"


def deviations_of(backend: type[DeviceBackend], checks: Collection[str]) -> dict[str, str]:
    """Check → reason; empty where there is no file.

    Raises `ConfigError` for a line without a reason, or one that names no check.
    """
    source = getattr(sys.modules.get(backend.__module__), "__file__", None)
    path = Path(source).with_name(FILE_NAME) if source else None
    if path is None or not path.is_file():
        return {}
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, reason = (part.strip() for part in line.partition(":"))
        if not name or name.startswith("#"):
            continue
        if name not in checks or not reason:
            raise ConfigError(str(path), line, "must be `check: reason` with the name of a check")
        found[name] = reason
    return found
