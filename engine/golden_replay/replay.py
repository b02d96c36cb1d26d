"""A whole file of vectors."""

import json
from pathlib import Path
from typing import Any

from slotmirror.engine.golden_replay.differences import Difference, ReplayReport
from slotmirror.engine.golden_replay.hash_vectors import replay_hash_vector, replay_start_values
from slotmirror.engine.golden_replay.manager_trace import replay_manager_trace
from slotmirror.engine.golden_replay.scheduler_trace import replay_scheduler_trace
from slotmirror.kvcache.block_hashing import group_key, rescale_block_hashes
from slotmirror.kvcache.events import external_block_hash
from slotmirror.kvcache.hash_functions import KeyFormat


def replay_file(path: str | Path) -> list[Difference]:
    """Every difference between a file's vectors and ours that is not a listed exception."""
    return replay_report(path).differences


def replay_report(path: str | Path) -> ReplayReport:
    """Replay a file. Raises OSError if it cannot be read, ValueError if it is not such a file."""
    with Path(path).open(encoding="utf-8") as file:
        try:
            data = json.load(file)
        except ValueError as cause:
            raise ValueError(f"{path} is not JSON: {cause}") from cause
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a file of vectors: its top level is no object")
    return replay(data)


def replay(data: dict[str, Any]) -> ReplayReport:
    """Replay the parts that `data` has; a part that it lacks is passed over."""
    report = ReplayReport()
    replay_start_values(data.get("none_hash", {}), KeyFormat.V0_25, report)
    for vector in data.get("hash_vectors", ()):
        replay_hash_vector(vector, KeyFormat.V0_25, report)
    tagged = data.get("hash_vectors_v0_32_0", {})
    replay_start_values(tagged.get("none_hash", {}), KeyFormat.TAGGED, report)
    for vector in tagged.get("hash_vectors", ()):
        replay_hash_vector(vector, KeyFormat.TAGGED, report)
    _replay_key_forms(data.get("misc", {}), report)
    for trace in data.get("manager_traces", ()):
        replay_manager_trace(trace, report)
    for trace in data.get("scheduler_traces", ()):
        replay_scheduler_trace(trace, report)
    return report


def _replay_key_forms(misc: dict[str, Any], report: ReplayReport) -> None:
    """The byte forms of a hash: with its group, and as an event's integer; and its rescaling."""
    if key := misc.get("group_key"):
        actual = group_key(bytes.fromhex(key["hash"]), key["group_id"]).hex()
        report.compare("misc/group_key", "key", key["key"], actual)
    if event_hash := misc.get("int64_event_hash"):
        block_hash = bytes.fromhex(event_hash["hash"])
        number = external_block_hash(block_hash, use_int_block_hashes=True)
        report.compare("misc/int64_event_hash", "int", event_hash["int"], number)
    if rescale := misc.get("hash_list_rescale"):
        small, large = rescale["hash_block_size"], rescale["target_block_size"]
        hashes = [bytes([i]) for i in range(8 * large // small)]
        scale = large // small
        expected = [hashes[(j + 1) * scale - 1] for j in range(len(hashes) // scale)]
        actual_hashes = rescale_block_hashes(hashes, small, large)
        report.compare("misc/hash_list_rescale", "hashes", expected, actual_hashes)
