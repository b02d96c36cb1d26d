"""What one stage has done, counted from its scheduler's outputs."""

from collections.abc import Callable
from dataclasses import dataclass

from slotmirror.engine.scheduling.output import SchedulerOutput


@dataclass(slots=True)
class StageCounters:
    """Counters of `pipeline_types.StageReport`; engine thread only."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    prefill_tokens_computed: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    steps: int = 0
    engine_seconds: float = 0.0

    def count_step(self, output: SchedulerOutput, prompt_length: Callable[[str], int]) -> None:
        """Count one step; `prompt_length` knows every scheduled request."""
        self.steps += bool(output.total_num_scheduled_tokens)
        self.preemptions += len(output.preempted_req_ids)
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.requests += 1
            self.prompt_tokens += prompt_length(new.req_id)
            self.hit_tokens += new.num_computed_tokens
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[req_id] = num_computed
            if req_id in cached.resumed_req_ids:
                self.resumed_hit_tokens += num_computed
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            left = max(prompt_length(req_id) - computed[req_id], 0)
            prefill = min(num_tokens, left)
            self.prefill_tokens_computed += prefill
            self.decode_tokens += num_tokens - prefill
