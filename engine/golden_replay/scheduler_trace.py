"""Traces of the scheduler: one step per entry, with the model's answers recorded."""

from slotmirror.engine.golden_replay.differences import ReplayReport
from slotmirror.engine.golden_replay.recording import (
    Recorded,
    RecordingManager,
    plain_events,
    trace_hasher,
)
from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.output import SchedulerOutput, StepResult
from slotmirror.kvcache.hash_functions import KeyFormat
from slotmirror.kvcache.request import Request, SamplingParams

Result = dict[str, object]

_USAGE_DIGITS = 6


def replay_scheduler_trace(trace: Recorded, report: ReplayReport) -> None:
    """Run every step on our scheduler and compare what it scheduled and what became of it."""
    replay = _SchedulerReplay(trace["config"])
    for i, step in enumerate(trace["steps"]):
        actual = replay.run(step)
        for name in actual.keys() & step.keys():
            where = f"scheduler/{trace['name']}[{i}]"
            report.compare(where, name, step[name], actual[name])
        report.num_scheduler_steps += 1


class _SchedulerReplay:
    def __init__(self, config: Recorded) -> None:
        caching = config["enable_caching"]
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=config["num_blocks"],
                block_size=config["block_size"],
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_model_len=config["max_model_len"],
                enable_prefix_caching=caching,
                key_format=KeyFormat.V0_25,
                policy=config["policy"],
                watermark=config["watermark"],
                reserve_full_isl=config["reserve_full_isl"],
                long_prefill_token_threshold=config["long_prefill_token_threshold"],
                enable_kv_cache_events=True,
            ),
            manager_type=RecordingManager,
        )
        manager = self._scheduler.kv_cache_manager
        assert isinstance(manager, RecordingManager)
        self._manager = manager
        self._hasher = trace_hasher(config, config["block_size"]) if caching else None

    def run(self, step: Recorded) -> Result:
        for added in step["add"]:
            self._scheduler.add_request(self._request(added))
        for req_id in step["abort"]:
            self._scheduler.abort_request(req_id)
        output = self._scheduler.schedule()
        result = _plain_output(output)
        result["evicted"] = self._manager.evictions.take()
        sampled = {req_id: tokens for req_id, (tokens, _) in step["outputs"].items()}
        updated = self._scheduler.update_from_output(output, sampled)
        return result | self._state(updated)

    def _request(self, added: Recorded) -> Request:
        return Request(
            added["rid"],
            added["tokens"],
            sampling_params=SamplingParams(max_tokens=added["max_tokens"]),
            cache_salt=added["salt"],
            priority=added["priority"],
            arrival_time=added["arrival"],
            block_hasher=self._hasher,
        )

    def _state(self, updated: StepResult) -> Result:
        scheduler = self._scheduler
        return {
            "outputs": {
                output.req_id: [output.new_token_ids, output.finish_reason]
                for output in updated.outputs
            },
            "stats": self._manager.take_lookups(),
            "usage": round(self._manager.usage, _USAGE_DIGITS),
            "running": scheduler.running_req_ids,
            "waiting": scheduler.waiting_req_ids,
            "free": list(self._manager.pool.free_queue),
            "events": plain_events(updated.events),
        }


def _plain_output(output: SchedulerOutput) -> Result:
    cached = output.scheduled_cached_reqs
    return {
        "new": [
            {
                "rid": new.req_id,
                "block_ids": list(new.block_ids),
                "num_computed_tokens": new.num_computed_tokens,
            }
            for new in output.scheduled_new_reqs
        ],
        "cached": [
            {
                "rid": req_id,
                "resumed": req_id in cached.resumed_req_ids,
                "new_block_ids": None if blocks is None else list(blocks),
                "num_computed_tokens": num_computed,
                "num_output_tokens": num_output,
                "all_token_ids": cached.all_token_ids.get(req_id),
            }
            for req_id, blocks, num_computed, num_output in zip(
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                strict=True,
            )
        ],
        "num_scheduled_tokens": output.num_scheduled_tokens,
        "total": output.total_num_scheduled_tokens,
        "num_common_prefix_blocks": output.num_common_prefix_blocks,
        "finished_req_ids": sorted(output.finished_req_ids),
        "preempted_req_ids": sorted(output.preempted_req_ids),
    }
