"""Traces of the KV-cache manager: one lookup, allocation or release per operation."""

from collections.abc import Callable

from slotmirror.engine.golden_replay.differences import ReplayReport
from slotmirror.engine.golden_replay.errors import known
from slotmirror.engine.golden_replay.recording import (
    Recorded,
    RecordingManager,
    plain_events,
    trace_groups,
    trace_hasher,
)
from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.request import (
    LoRARequest,
    MultimodalFeature,
    Request,
    RequestStatus,
    SamplingParams,
)
from slotmirror.kvcache.specs import KVCacheConfig

Result = dict[str, object]


def replay_manager_trace(trace: Recorded, report: ReplayReport) -> None:
    """Run every operation on our manager and compare each of its recorded results."""
    replay = _ManagerReplay(trace["config"])
    where = f"manager/{trace['name']}"
    report.compare(where, "watermark_blocks", trace["watermark_blocks"], replay.watermark_blocks)
    for i, op in enumerate(trace["ops"]):
        actual = replay.run(op)
        for name in actual.keys() & op.keys():
            expected, got = op[name], actual[name]
            if op["op"] == "evict" and name in ("evicted", "events"):
                # The order is that of a set of ids.
                expected, got = _sorted(expected), _sorted(got)
            report.compare(f"{where}[{i}] {op['op']} {op.get('rid', '')}", name, expected, got)
        report.num_manager_ops += 1
    report.compare(where, "stats", trace["stats"], replay.manager.take_lookups())


class _ManagerReplay:
    def __init__(self, config: Recorded) -> None:
        self._config = config
        self.manager = RecordingManager(
            KVCacheConfig(config["num_blocks"], trace_groups(config["groups"])),
            config["max_model_len"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            hash_block_size=config["hash_block_size"],
            enable_caching=config["enable_caching"],
            use_eagle=config["use_eagle"],
            watermark=config["watermark"],
        )
        self.watermark_blocks = self.manager.watermark_blocks
        self._hasher = trace_hasher(config, config["hash_block_size"])
        self._requests: dict[str, Request] = {}
        self._num_scheduled: dict[str, int] = {}
        self._handlers: dict[str, Callable[[Recorded], Result]] = {
            "add": self._add,
            "resume": self._admit,
            "decode": self._decode,
            "free": self._free,
            "preempt": self._preempt,
            "evict": self._evict,
            "reset": self._reset,
            "common": self._common,
        }

    def run(self, op: Recorded) -> Result:
        result = known(self._handlers, op["op"], "operation")(op)
        result["evicted"] = self.manager.evictions.take()
        result["events"] = plain_events(self.manager.take_events())
        result["free"] = list(self.manager.pool.free_queue)
        result["cached_keys"] = self.manager.pool.num_cached_keys
        return result

    def _add(self, op: Recorded) -> Result:
        request = Request(
            op["rid"],
            op["tokens"],
            sampling_params=SamplingParams(skip_reading_prefix_cache=op["skip_read"]),
            lora_request=LoRARequest(op["lora"]) if op["lora"] else None,
            cache_salt=op["salt"],
            mm_features=[MultimodalFeature(*feature) for feature in op["mm"] or ()],
            block_hasher=self._hasher,
        )
        self._requests[op["rid"]] = request
        return {"num_hashes": len(request.block_hashes), **self._admit(op)}

    def _admit(self, op: Recorded) -> Result:
        request = self._requests[op["rid"]]
        hit_blocks, num_hits = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hits
        if op["chunk"] is not None:
            num_new = min(num_new, op["chunk"])
        new_blocks = self.manager.allocate_slots(
            request,
            num_new,
            num_hits,
            hit_blocks,
            num_lookahead_tokens=self._config["lookahead"],
            full_sequence_must_fit=self._config["full_fit"],
            has_scheduled_reqs=bool(self._num_scheduled),
        )
        if new_blocks is not None:
            request.num_computed_tokens = num_hits
            request.status = RequestStatus.RUNNING
        return {
            "hit_tokens": num_hits,
            "hit_blocks": list(hit_blocks),
            "num_new": num_new,
            **self._allocated(request, num_new, new_blocks),
            **({} if new_blocks is not None else {"table": None}),
        }

    def _decode(self, op: Recorded) -> Result:
        request = self._requests[op["rid"]]
        request.num_computed_tokens += self._num_scheduled[op["rid"]]
        self._num_scheduled[op["rid"]] = 0
        computed = request.num_computed_tokens
        if op["append"]:
            request.append_output_token_ids(op["append"])
        new_blocks = self.manager.allocate_slots(
            request, op["num_new"], num_lookahead_tokens=self._config["lookahead"]
        )
        return {"computed": computed, **self._allocated(request, op["num_new"], new_blocks)}

    def _allocated(self, request: Request, num_new: int, blocks: BlockIds | None) -> Result:
        table = list(self.manager.get_block_ids(request.request_id))
        if blocks is None:
            return {"ok": False, "new_blocks": None, "table": table}
        self._num_scheduled[request.request_id] = num_new
        return {"ok": True, "new_blocks": list(blocks), "table": table}

    def _free(self, op: Recorded) -> Result:
        self._num_scheduled.pop(op["rid"], None)
        self.manager.free(self._requests.pop(op["rid"]))
        return {}

    def _preempt(self, op: Recorded) -> Result:
        request = self._requests[op["rid"]]
        del self._num_scheduled[op["rid"]]
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        return {}

    def _evict(self, op: Recorded) -> Result:
        self.manager.evict_blocks(set(op["blocks"]))
        return {}

    def _reset(self, op: Recorded) -> Result:
        return {"ok": self.manager.reset_prefix_cache()}

    def _common(self, op: Recorded) -> Result:
        return {"result": self.manager.get_num_common_prefix_blocks(op["rid"])}


def _sorted(values: object) -> list[str]:
    assert isinstance(values, list)
    return sorted(map(repr, values))
