"""The byte forms of a hash: with its group, as an event's integer, rescaled, and on the wire."""

from slotmirror.engine.golden_replay.differences import ReplayReport
from slotmirror.engine.golden_replay.event_bytes import replay_event_batch
from slotmirror.engine.golden_replay.recording import Recorded
from slotmirror.kvcache.block_hashing import group_key, rescale_block_hashes
from slotmirror.kvcache.events import external_block_hash


def replay_key_forms(misc: Recorded, report: ReplayReport) -> None:
    """Compare the single vectors of the part `misc`."""
    if key := misc.get("group_key"):
        actual = group_key(bytes.fromhex(key["hash"]), key["group_id"]).hex()
        report.compare("misc/group_key", "key", key["key"], actual)
    if event_hash := misc.get("int64_event_hash"):
        block_hash = bytes.fromhex(event_hash["hash"])
        number = external_block_hash(block_hash, use_int_block_hashes=True)
        report.compare("misc/int64_event_hash", "int", event_hash["int"], number)
    if rescale := misc.get("hash_list_rescale"):
        _replay_rescaling(rescale["hash_block_size"], rescale["target_block_size"], report)
    if batch := misc.get("kv_event_batch_msgpack"):
        replay_event_batch(batch, report)


def _replay_rescaling(small: int, large: int, report: ReplayReport) -> None:
    """The recorded rule: larger block j uses hash (j + 1) * scale - 1."""
    scale = large // small
    hashes = [bytes([i]) for i in range(8 * scale)]
    expected = [hashes[(j + 1) * scale - 1] for j in range(len(hashes) // scale)]
    actual = rescale_block_hashes(hashes, small, large)
    report.compare("misc/hash_list_rescale", "hashes", expected, actual)
