"""The bytes of a batch of KV events, for a scenario that is told in one sentence.

Such as: `block_size 4, tokens 0..8, lora 'L' (int id 1), salt 'S', sha256 seed '0'; allocate 9
tokens, free, evict_blocks({1}), reset_prefix_cache; batch ts=1.5, data_parallel_rank=0, int
hashes`. Adapter and salt may be missing; hashes may be raw.
"""

import re
from collections.abc import Callable

from slotmirror.engine.golden_replay.differences import ReplayReport
from slotmirror.engine.golden_replay.errors import VectorFileError, known
from slotmirror.engine.golden_replay.recording import Recorded
from slotmirror.kvcache.block_hashing import get_request_block_hasher
from slotmirror.kvcache.event_stream.wire import KVEventBatch, encode_batch
from slotmirror.kvcache.events import KVEventLog
from slotmirror.kvcache.hash_functions import (
    HASH_FUNCTIONS,
    SEED_VARIABLE,
    KeyFormat,
    init_start_value,
)
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import LoRARequest, Request
from slotmirror.kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

_NUM_BLOCKS = 64
_REQUEST = re.compile(
    r"block_size (?P<block_size>\d+), tokens (?P<first>\d+)\.\.(?P<last>\d+)"
    r"(?:, lora '(?P<lora>[^']*)' \(int id (?P<lora_id>\d+)\))?(?:, salt '(?P<salt>[^']*)')?"
    r", (?P<algo>\w+) seed '(?P<seed>[^']*)'"
)
_BATCH = re.compile(r"batch ts=([\d.]+), data_parallel_rank=(\d+), (int|raw) hashes")
_OPERATION = re.compile(
    r"(allocate (\d+) tokens|free|evict_blocks\(\{(\d+(?:, ?\d+)*)\}\)|reset_prefix_cache)"
)


def replay_event_batch(vector: Recorded, report: ReplayReport) -> None:
    """Play the scenario, encode what it emitted and compare the bytes.

    Raises VectorFileError for a scenario that is not understood, ModuleNotFoundError without
    msgspec.
    """
    scenario = _Scenario(vector["scenario"])
    report.compare(
        "misc/kv_event_batch_msgpack", "msgpack_hex", vector["msgpack_hex"], scenario.run().hex()
    )


class _Scenario:
    def __init__(self, text: str) -> None:
        parts = text.split("; ")
        request = _REQUEST.fullmatch(parts[0])
        batch = _BATCH.fullmatch(parts[-1])
        if len(parts) != 3 or request is None or batch is None:
            raise VectorFileError(f"KV-event scenario {text!r} is not understood")
        self._operations = parts[1]
        self._ts, self._rank = float(batch[1]), int(batch[2])
        size = int(request["block_size"])
        self._request = _build_request(request, size)
        self._manager = KVCacheManager(
            KVCacheConfig(_NUM_BLOCKS, (KVCacheGroupSpec(FullAttentionSpec(size)),)),
            _NUM_BLOCKS * size,
            events=KVEventLog(KeyFormat.V0_25, use_int_block_hashes=batch[3] == "int"),
        )

    def run(self) -> bytes:
        for operation in re.split(r", (?![^{]*\})", self._operations):
            match = _OPERATION.fullmatch(operation)
            if match is None:
                raise VectorFileError(f"KV-event operation {operation!r} is not understood")
            self._handler(match)()
        return encode_batch(KVEventBatch(self._ts, self._manager.take_events(), self._rank))

    def _handler(self, match: re.Match[str]) -> Callable[[], object]:
        manager, request = self._manager, self._request
        if match[2] is not None:
            return lambda: manager.allocate_slots(request, int(match[2]))
        if match[3] is not None:
            return lambda: manager.evict_blocks({int(block) for block in match[3].split(",")})
        if match[1] == "free":
            return lambda: manager.free(request)
        return manager.reset_prefix_cache


def _build_request(match: re.Match[str], block_size: int) -> Request:
    algo = match["algo"]
    hash_function = known(HASH_FUNCTIONS, algo, "hash algorithm")
    start_value = init_start_value(algo, KeyFormat.V0_25, {SEED_VARIABLE: match["seed"]})
    lora = match["lora"]
    return Request(
        "r",
        range(int(match["first"]), int(match["last"]) + 1),
        lora_request=LoRARequest(lora, adapter_id=int(match["lora_id"])) if lora else None,
        cache_salt=match["salt"],
        block_hasher=get_request_block_hasher(
            block_size, hash_function, start_value, KeyFormat.V0_25
        ),
    )
