"""No request ever reads a slot that does not hold its own prefix."""

import pytest

from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.request_queue import SchedulingPolicy
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import Request, SamplingParams
from slotmirror.kvcache.specs import FullAttentionSpec, KVCacheGroupSpec
from support.kv_builders import due_tokens
from support.kv_oracle import OracleWorker, TrackedRequest
from support.kv_oracle_traces import OracleTrace

NUM_TRACES, NUM_STEPS = 150, 60


class KeepsUnwrittenHashes(KVCacheManager):
    """What vLLM 0.25.1 and 0.32.0 do: hashes of blocks that were never written stay (X1)."""

    def drop_unwritten_hashes(self, request):
        pass


def test_random_traces():
    """Both policies, salts, adapters, images, sessions, drafts, hybrids, aborts, forced resets:
    0 violations. A failing seed is printed; `OracleTrace(seed).run(60)` repeats it."""
    checks = hits = preemptions = resets = 0
    for seed in range(NUM_TRACES):
        result = OracleTrace(seed).run(NUM_STEPS)
        assert not result.violations, f"seed {seed}: {result.violations[0]}"
        checks += result.num_checks
        hits += result.num_hit_tokens
        preemptions += result.num_preemptions
        resets += result.num_forced_resets
    assert checks > 200_000
    assert hits > 10_000
    assert preemptions > 500
    assert resets > 100


def test_the_oracle_sees_a_wrong_hit():
    """Seed 47 with the old behaviour of X1: the oracle is not blind."""
    assert OracleTrace(47, KeepsUnwrittenHashes).run(NUM_STEPS).violations


class OracleRun:
    """A scheduler by priority whose requests run on an oracle worker; every sampled token is 7."""

    def __init__(self, manager_type, **options):
        config = SchedulerConfig(block_size=4, policy=SchedulingPolicy.PRIORITY, **options)
        self.scheduler = Scheduler(config, clock=lambda: 0.0, manager_type=manager_type)
        self.worker = OracleWorker(
            config.num_blocks, [KVCacheGroupSpec(FullAttentionSpec(config.block_size))]
        )
        self.tracked = {}

    def add(self, req_id, tokens, priority, max_tokens):
        request = Request(
            req_id,
            tokens,
            priority=priority,
            sampling_params=SamplingParams(max_tokens=max_tokens),
        )
        self.scheduler.add_request(request)
        self.tracked[req_id] = TrackedRequest(request, list(tokens), 0)
        return request

    def step(self):
        output = self.scheduler.schedule()
        self.worker.execute(output, self.tracked)
        known = {req_id: tracked.request for req_id, tracked in self.tracked.items()}
        result = self.scheduler.update_from_output(output, due_tokens(output, known))
        for out in result.outputs:
            self.tracked[out.req_id].tokens += out.new_token_ids
        return output


@pytest.mark.parametrize("issue", ["43569", "57580", "41838"])
@pytest.mark.parametrize(
    ("manager_type", "resumed_at"), [(KVCacheManager, 32), (KeepsUnwrittenHashes, 36)]
)
def test_issue_preempted_in_its_own_step(issue, manager_type, resumed_at):
    """X1: a long prompt of low priority gets two new full blocks, then loses them in the same
    step to a request of high priority. It resumes with the 32 tokens that were written.

    With the old behaviour it resumes with 36 and reads slots that nobody filled.
    """
    run = OracleRun(
        manager_type,
        num_blocks=14,
        max_num_batched_tokens=64,
        max_model_len=64,
        reserve_full_isl=False,
        long_prefill_token_threshold=8,
    )
    loser = run.add("loser", range(100, 142), priority=9, max_tokens=2)
    run.step()
    winner = run.add("winner", [50] * 11, priority=0, max_tokens=4)
    for _ in range(3):
        run.step()
    assert (loser.num_computed_tokens, winner.num_computed_tokens) == (32, 12)

    output = run.step()
    assert output.preempted_req_ids == {"loser"}
    assert list(output.num_scheduled_tokens) == ["winner"]
    while not output.scheduled_cached_reqs.resumed_req_ids:
        output = run.step()
    assert output.scheduled_cached_reqs.num_computed_tokens == [resumed_at]
    assert bool(run.worker.violations) is (resumed_at > 32)
