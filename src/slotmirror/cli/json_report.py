"""Reports for machines: checked before the work starts, written when it is done."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from slotmirror.core.errors import ConfigError


def check_json_file(path: Path | None) -> None:
    """Raise `ConfigError` now, not after minutes of work, if the report cannot be written."""
    check_output_file("json", path)


def check_output_file(setting: str, path: Path | None) -> None:
    """The same for the file that another setting names."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(setting, str(path), "is a folder, not a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(setting, str(path), "cannot be written: no such folder, or no permission")


def write_json(path: Path | None, report: Mapping[str, object]) -> None:
    """Write the report, if a file for it was named.

    Raises:
        ConfigError: the file system refuses.
    """
    if path is not None:
        write_output_file("json", path, json.dumps(report, indent=2) + "\n")


def write_output_file(setting: str, path: Path, text: str) -> None:
    """Write a file that a setting names.

    Raises:
        ConfigError: the file system refuses.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError(setting, str(path), rule) from error
