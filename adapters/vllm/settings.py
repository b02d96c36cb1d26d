"""The operator's settings: `additional_config={"slotmirror": {...}}`, then the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, cast

from slotmirror.adapters.delivery.sink import WhenFull
from slotmirror.core.errors import ConfigError

SECTION = "slotmirror"
ENVIRONMENT_VARIABLE = "SLOTMIRROR_VLLM"

SinkName: TypeAlias = Literal["callback", "files", "shared_memory"]
Deliver: TypeAlias = Literal["prompt", "all"]

_CHOICES = {
    "sink": ("callback", "files", "shared_memory"),
    "deliver": ("prompt", "all"),
    "when_full": ("block", "drop", "fail"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """What an operator may say; all but `sink` has a default.

    sink                     "files" in `folder`; "shared_memory" under `name`; or "callback", a
                             function named "module:function"
    deliver                  "prompt": the prompt's rows, as soon as it is whole; "all": the rows
                             of every position, when the request ends
    when_full                what happens when a sink takes no more: "block" for `block_timeout_s`,
                             "drop" the request, or "fail"
    queue_bytes_max          bytes of whole requests that may wait for their sink
    shared_memory_bytes_max  unread bytes in shared memory
    layers                   decoder layers whose output is kept as `hidden_states.layer_K`
    debug_slots              compare our slots with the engine's own in every step
    backend                  name of the device backend; by the engine's device if not given
    cache                    fields of `PrefixCacheConfig`
    """

    sink: SinkName
    folder: str | None = None
    name: str | None = None
    callback: str | None = None
    deliver: Deliver = "prompt"
    when_full: WhenFull = "block"
    block_timeout_s: float = 20.0
    shutdown_timeout_s: float = 30.0
    queue_bytes_max: int = 256 << 20
    shared_memory_bytes_max: int = 1 << 30
    layers: tuple[int, ...] = ()
    debug_slots: bool = False
    backend: str | None = None
    cache: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(name, getattr(self, name), f"must be one of {', '.join(choices)}")
        needed = {"files": "folder", "shared_memory": "name", "callback": "callback"}[self.sink]
        if not isinstance(getattr(self, needed), str):
            rule = f"sink={self.sink!r} needs it, as text"
            raise ConfigError(needed, getattr(self, needed), rule)
        for name in ("queue_bytes_max", "shared_memory_bytes_max"):
            _check_number(name, getattr(self, name), int)
        for name in ("block_timeout_s", "shutdown_timeout_s"):
            _check_number(name, getattr(self, name), (int, float))
        if not all(type(layer) is int and layer >= 0 for layer in self.layers):
            raise ConfigError("layers", self.layers, "must be numbers of layers, from 0")
        if not isinstance(self.debug_slots, bool):
            raise ConfigError("debug_slots", self.debug_slots, "must be true or false")


def read_settings(
    additional_config: object, environment: Mapping[str, str] = os.environ
) -> AdapterSettings:
    """Settings of the engine's configuration; the environment's JSON object wins, key by key.

    Raises `ConfigError`, naming the setting.
    """
    section: object = {}
    if isinstance(additional_config, Mapping):
        section = additional_config.get(SECTION, {})
    values = {**_mapping(SECTION, section), **_from_environment(environment)}
    known = [entry.name for entry in fields(AdapterSettings)]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(name, value, f"unknown; settings are {', '.join(known)}")
    if "sink" not in values:
        raise ConfigError(
            "sink",
            None,
            f"say where rows go: additional_config={{{SECTION!r}: {{'sink': 'files', 'folder': "
            f"…}}}}, or {ENVIRONMENT_VARIABLE} with the same as JSON",
        )
    if "layers" in values:
        layers = values["layers"]
        if not isinstance(layers, list | tuple):
            raise ConfigError("layers", layers, "must be a list of numbers of layers, from 0")
        values["layers"] = tuple(layers)
    values["cache"] = _mapping("cache", values.get("cache", {}))
    return AdapterSettings(**values)  # type: ignore[arg-type]


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    text = environment.get(ENVIRONMENT_VARIABLE)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(ENVIRONMENT_VARIABLE, text, f"must be a JSON object: {error}") from error
    return _mapping(ENVIRONMENT_VARIABLE, value)


def _mapping(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "must be a mapping of settings")
    return {str(key): entry for key, entry in value.items()}


def _check_number(name: str, value: object, kinds: type | tuple[type, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not cast("float", value) > 0:
        raise ConfigError(name, value, "must be a number above 0")
