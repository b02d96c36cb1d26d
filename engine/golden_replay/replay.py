"""A whole file of vectors."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slotmirror.engine.golden_replay.differences import Difference, ReplayReport
from slotmirror.engine.golden_replay.errors import VectorFileError, VectorObject
from slotmirror.engine.golden_replay.hash_vectors import replay_hash_vector, replay_start_values
from slotmirror.engine.golden_replay.key_forms import replay_key_forms
from slotmirror.engine.golden_replay.manager_trace import replay_manager_trace
from slotmirror.engine.golden_replay.recording import Recorded
from slotmirror.engine.golden_replay.scheduler_trace import replay_scheduler_trace
from slotmirror.kvcache.hash_functions import KeyFormat

_PARTS = (
    *("none_hash", "hash_vectors", "hash_vectors_v0_32_0"),
    *("misc", "manager_traces", "scheduler_traces"),
)


def replay_file(path: str | Path) -> list[Difference]:
    """Every difference between a file's vectors and ours that is not a listed exception."""
    return replay_report(path).differences


def replay_report(path: str | Path) -> ReplayReport:
    """Replay a file.

    Raises OSError if it cannot be read, VectorFileError naming it if it is not such a file, and
    ModuleNotFoundError if a vector needs a package that is not installed.
    """
    text = Path(path).read_bytes()
    try:
        data = json.loads(text, object_hook=VectorObject)
    except ValueError as cause:
        raise VectorFileError(f"{path} is not JSON: {cause}") from cause
    if not isinstance(data, dict):
        raise VectorFileError(f"{path} is not a file of vectors: its top level is no object")
    try:
        with _no_warnings():
            return replay(data)
    except VectorFileError as cause:
        raise VectorFileError(f"{path}: {cause}") from cause


def replay(data: Mapping[str, Any]) -> ReplayReport:
    """Replay the parts that `data` has; a part that it lacks is passed over.

    Raises VectorFileError for data without any known part, with a part of another shape, or with
    a value that is not understood.
    """
    if not any(part in data for part in _PARTS):
        raise VectorFileError(f"none of {', '.join(_PARTS)} is in it: it holds no vectors")
    report = ReplayReport()
    _replay_hashes(data, KeyFormat.V0_25, report)
    _replay_hashes(_object(data, "hash_vectors_v0_32_0"), KeyFormat.TAGGED, report)
    replay_key_forms(_object(data, "misc"), report)
    for trace in _objects(data, "manager_traces"):
        replay_manager_trace(trace, report)
    for trace in _objects(data, "scheduler_traces"):
        replay_scheduler_trace(trace, report)
    return report


def _replay_hashes(data: Recorded, key_format: KeyFormat, report: ReplayReport) -> None:
    replay_start_values(_object(data, "none_hash"), key_format, report)
    for vector in _objects(data, "hash_vectors"):
        replay_hash_vector(vector, key_format, report)


def _object(data: Recorded, part: str) -> Recorded:
    value = data.get(part, {})
    if not isinstance(value, dict):
        raise VectorFileError(f"{part} must be an object, not {type(value).__name__}")
    return value


def _objects(data: Recorded, part: str) -> list[Recorded]:
    values = data.get(part, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise VectorFileError(f"{part} must be a list of objects")
    return values


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Vectors try what the KV cache warns of, such as resets while blocks are in use."""
    logger = logging.getLogger("slotmirror.kvcache")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
