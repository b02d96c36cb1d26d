"""The recorded form of a trace, and its file.

A step holds what the cache is told and what the stage computes, by the stamps of its rows; a take
is one call of a consumer and the hash of what it must get.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from slotmirror.conformance.traces.trace import TraceStep
from slotmirror.core.errors import ConfigError
from slotmirror.core.events import AdmittedRequest, StepEvents

FORMAT = 1
SHIPPED = "stage_traces.json"


@dataclass(frozen=True, slots=True)
class Take:
    """One call: these requests of the step with this number, or a discard if `sha256` is empty."""

    step: int
    req_ids: tuple[str, ...]
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """One step. `takes` come after its start and before its save.

    number  its number in the trace, from 1; takes name saved steps by it
    stamps  first stamp of each scheduled request's rows, batch order
    """

    number: int
    events: StepEvents
    stamps: tuple[int, ...]
    takes: tuple[Take, ...]
    saved: bool
    keys: tuple[str, ...]
    order: tuple[str, ...]
    padding: int
    padded: frozenset[str]
    leftover: bool
    reset: str


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One golden trace. `config` and `policy` are the settings that differ from the defaults."""

    name: str
    config: dict[str, Any]
    policy: dict[str, Any]
    steps: tuple[RecordedStep, ...]
    last_takes: tuple[Take, ...]


def recorded_step(number: int, step: TraceStep, takes: tuple[Take, ...]) -> RecordedStep:
    """The step of a drawn trace, without what only the plain model needs."""
    return RecordedStep(
        number=number,
        events=step.events,
        stamps=tuple(part.stamps for part in step.parts),
        takes=takes,
        saved=step.saved,
        keys=step.keys,
        order=step.order,
        padding=step.padding,
        padded=step.padded & frozenset(step.keys),
        leftover=step.leftover,
        reset=step.reset,
    )


def write_recordings(path: Path, recordings: list[Recording]) -> None:
    """Write the file, one trace a line. Raises `ConfigError`."""
    lines = ",\n".join(json.dumps(_trace_json(one), separators=(",", ":")) for one in recordings)
    text = f'{{"format":{FORMAT},"traces":[\n{lines}\n]}}\n'
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("file", str(path), f"cannot be written: {error.strerror}") from error


def read_recordings(path: Path | None = None) -> list[Recording]:
    """The traces of a file, by default of the shipped one. Raises `ConfigError`."""
    if path is None:
        text = (files("slotmirror.conformance.golden") / "data" / SHIPPED).read_text("utf-8")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError("file", str(path), f"cannot be read: {error.strerror}") from error
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ConfigError("file", str(path), f"has format {data['format']}, not {FORMAT}")
        return [_trace(one) for one in data["traces"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("file", str(path), f"is no file of golden traces: {error!r}") from error


# -- to JSON ------------------------------------------------------------------------------------


def _trace_json(recording: Recording) -> dict[str, Any]:
    return {
        "name": recording.name,
        "config": recording.config,
        "policy": recording.policy,
        "steps": [_step_json(step) for step in recording.steps],
        "takes": [_take_json(take) for take in recording.last_takes],
    }


def _take_json(take: Take) -> list[Any]:
    return [take.step, list(take.req_ids), take.sha256]


def _step_json(step: RecordedStep) -> dict[str, Any]:
    events = step.events
    data = {
        "ended": list(events.ended),
        "preempted": list(events.preempted),
        "new": [_admitted_json(one) for one in events.new],
        "resumed": [_admitted_json(one) for one in events.resumed],
        "replaced": list(events.replaced),
        "drafted": list(events.drafted),
        "verified": dict(events.verified_positions),
        "runs": list(events.req_ids),
        "first": events.first_positions.tolist(),
        "tokens": events.num_tokens.tolist(),
        "slots": events.slots.tolist(),
        "stamps": list(step.stamps),
        "takes": [_take_json(take) for take in step.takes],
        "saved": step.saved,
        "keys": list(step.keys),
        "order": list(step.order) if step.order != events.req_ids else [],
        "padding": step.padding,
        "padded": sorted(step.padded),
        "leftover": step.leftover,
        "reset": step.reset,
    }
    return {name: value for name, value in data.items() if value}


def _admitted_json(one: AdmittedRequest) -> list[Any]:
    return [one.req_id, one.num_computed_tokens, list(one.block_ids)]


# -- from JSON ----------------------------------------------------------------------------------


def _trace(data: dict[str, Any]) -> Recording:
    steps = tuple(_step(number, one) for number, one in enumerate(data["steps"], start=1))
    takes = tuple(_take(one) for one in data["takes"])
    return Recording(data["name"], data["config"], data["policy"], steps, takes)


def _take(data: list[Any]) -> Take:
    step, req_ids, sha256 = data
    return Take(step, tuple(req_ids), sha256)


def _step(number: int, data: dict[str, Any]) -> RecordedStep:
    events = StepEvents(
        ended=tuple(data.get("ended", ())),
        preempted=tuple(data.get("preempted", ())),
        new=tuple(_admitted(one) for one in data.get("new", ())),
        resumed=tuple(_admitted(one) for one in data.get("resumed", ())),
        replaced=tuple(data.get("replaced", ())),
        drafted=tuple(data.get("drafted", ())),
        verified_positions=data.get("verified", {}),
        req_ids=tuple(data.get("runs", ())),
        first_positions=np.array(data.get("first", ()), dtype=np.int64),
        num_tokens=np.array(data.get("tokens", ()), dtype=np.int64),
        slots=np.array(data.get("slots", ()), dtype=np.int64),
    )
    return RecordedStep(
        number=number,
        events=events,
        stamps=tuple(data.get("stamps", ())),
        takes=tuple(_take(one) for one in data.get("takes", ())),
        saved=data.get("saved", False),
        keys=tuple(data.get("keys", ())),
        order=tuple(data.get("order", events.req_ids)),
        padding=data.get("padding", 0),
        padded=frozenset(data.get("padded", ())),
        leftover=data.get("leftover", False),
        reset=data.get("reset", ""),
    )


def _admitted(data: list[Any]) -> AdmittedRequest:
    req_id, computed, blocks = data
    return AdmittedRequest(req_id, computed, tuple(blocks))
