"""The stages of a pipeline, from a TOML file: one table per stage, settings named as in the cache.

[[stage]]
name = "thinker"
num_blocks = 20000
block_size = 16
keys = ["hidden:4096:bfloat16"]
"""

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import ConfigError, UsageError
from slotmirror.core.key_spec import KeySpec

_KEY_RULE = "must be NAME:WIDTH:DTYPE, such as hidden:2048:bfloat16 or codes:4x16:int64"
_CONFIG = tuple(field.name for field in fields(PrefixCacheConfig))
_REQUIRED = ("name", "num_blocks", "block_size", "keys")
_OWN = ("name", "processes", "keys", "deferred_keys")


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What one stage keeps.

    Attributes:
        name: unique within the pipeline.
        processes: of one replica, each with a cache of its own.
        config: settings of each of these caches.
        keys: per-token outputs.
        deferred_keys: names of those that are written once, when their request ends.
    """

    name: str
    config: PrefixCacheConfig
    keys: tuple[KeySpec, ...]
    deferred_keys: frozenset[str] = frozenset()
    processes: int = 1


def parse_key(text: str) -> KeySpec:
    """The key that `NAME:WIDTH:DTYPE` describes; several dimensions are joined by `x`.

    Raises:
        ConfigError: the text has another form, a dimension below 1 or an unknown dtype.
    """
    parts = text.rsplit(":", maxsplit=2)
    if len(parts) != 3 or not parts[0]:
        raise ConfigError("key", text, _KEY_RULE)
    name, shape, dtype_name = parts
    sizes = shape.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise ConfigError("key", text, _KEY_RULE)
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError("key", text, f"torch has no dtype {dtype_name!r}")
    return KeySpec(name, tuple(map(int, sizes)), dtype)


def read_stages(path: Path) -> tuple[StageSettings, ...]:
    """The stages that a file describes, in its order.

    Raises:
        UsageError: the file cannot be read, or a value in it cannot be; names stage and setting.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("stages", str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("stages", str(path), f"is no TOML file: {error}") from error
    _refuse_unknown(str(path), document, ("stage",))
    tables = document.get("stage")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("stages", str(path), "must have a [[stage]] table for each stage")
    stages = tuple(_stage(f"stage {number}", table) for number, table in enumerate(tables, start=1))
    _refuse_repeated("name", [stage.name for stage in stages])
    return stages


def _stage(place: str, table: Mapping[str, object]) -> StageSettings:
    name = table.get("name")
    if isinstance(name, str) and name:
        place = f"stage {name!r}"
    try:
        return _checked(table)
    except ConfigError as error:
        raise UsageError(f"{place}: {error}") from error


def _checked(table: Mapping[str, object]) -> StageSettings:
    _refuse_unknown("stage", table, (*_OWN, *_CONFIG))
    for setting in _REQUIRED:
        if setting not in table:
            raise ConfigError(setting, None, "is missing")
    name, processes = table["name"], table.get("processes", 1)
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "must be a text")
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise ConfigError("processes", processes, "must be a whole number of at least 1")
    keys = tuple(map(parse_key, _texts("keys", table["keys"])))
    names = [key.name for key in keys]
    if not names:
        raise ConfigError("keys", names, "must name at least one per-token output")
    _refuse_repeated("keys", names)
    deferred = _texts("deferred_keys", table.get("deferred_keys", []))
    if unknown := sorted(set(deferred) - set(names)):
        raise ConfigError("deferred_keys", unknown, f"is none of the keys {names}")
    # The configuration checks the types of its own settings.
    config = PrefixCacheConfig(**{s: table[s] for s in _CONFIG if s in table})  # type: ignore[arg-type]
    return StageSettings(name, config, keys, frozenset(deferred), processes)


def _texts(setting: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(setting, value, "must be a list of texts")
    return value


def _refuse_unknown(place: str, table: Mapping[str, object], known: Collection[str]) -> None:
    for setting, value in table.items():
        if setting not in known:
            raise ConfigError(setting, value, f"unknown in {place}; known: {', '.join(known)}")


def _refuse_repeated(setting: str, names: list[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(setting, repeated, "given twice")
