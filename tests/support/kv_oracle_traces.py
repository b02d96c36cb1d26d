"""Random traces for the KV oracle, each from one seed.

`PYTHONPATH=tests python -m support.kv_oracle_traces --traces 2000` runs many and prints what was
checked.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.request_queue import SchedulingPolicy
from slotmirror.kvcache.hash_functions import KeyFormat
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import LoRARequest, MultimodalFeature, Request, SamplingParams
from slotmirror.kvcache.specs import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from support.kv_oracle import OracleWorker, TrackedRequest, Violation, sample_tokens

_MAX_MODEL_LEN = 96
_ADAPTERS = (
    LoRARequest("a", "/one"),
    LoRARequest("a", "/two"),
    LoRARequest("a", "/one", version=1),
    LoRARequest("s1", "/one"),
)
_SALTS = (None, None, None, "s1", "a", "")


@dataclass
class TraceResult:
    """What one trace did."""

    seed: int
    num_checks: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_forced_resets: int = 0
    violations: list[Violation] = field(default_factory=list)


class OracleTrace:
    """One scheduler, one oracle worker, and random events between and within steps."""

    def __init__(self, seed: int, manager_type: type[KVCacheManager] = KVCacheManager) -> None:
        self._rng = rng = random.Random(seed)
        self._groups = random_groups(rng)
        self._config = random_config(rng)
        self.scheduler = Scheduler(
            self._config, self._groups, clock=lambda: 0.0, manager_type=manager_type
        )
        self._worker = OracleWorker(self._config.num_blocks, self._groups)
        self._tracked: dict[str, TrackedRequest] = {}
        self._sessions: set[str] = set()
        self._prefixes = [
            [rng.randrange(50) for _ in range(rng.choice((9, 24, 40)))] for _ in range(3)
        ]
        self._epoch = 0
        self.result = TraceResult(seed)

    def run(self, num_steps: int) -> TraceResult:
        for step in range(num_steps):
            for _ in range(self._rng.choice((0, 0, 1, 2))):
                self._add_request(f"r{step}.{self._rng.random():.6f}", float(step))
            if self._rng.random() < 0.08:
                self._abort()
            if self._rng.random() < 0.03:
                self._reset()
            self._continue_sessions()
            self._step()
        self.result.num_checks = self._worker.num_checks
        self.result.violations = self._worker.violations
        return self.result

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self._worker.execute(output, self._tracked)
        self.result.num_hit_tokens += sum(
            new.num_computed_tokens for new in output.scheduled_new_reqs
        )
        self.result.num_preemptions += len(output.preempted_req_ids)
        if self._rng.random() < 0.05:
            self._abort()
        sampled = sample_tokens(output, self._tracked, self._rng)
        result = self.scheduler.update_from_output(output, sampled)
        for out in result.outputs:
            self._tracked[out.req_id].tokens += out.new_token_ids
            if out.finish_reason is not None and out.req_id not in self._sessions:
                del self._tracked[out.req_id]
        if self._config.num_speculative_tokens:
            self.scheduler.update_draft_token_ids(
                {
                    req_id: [
                        self._rng.randrange(60, 70)
                        for _ in range(self._config.num_speculative_tokens)
                    ]
                    for req_id in sampled
                    if req_id in self._tracked
                }
            )

    def _add_request(self, req_id: str, arrival_time: float) -> None:
        rng = self._rng
        prefix = rng.choice(self._prefixes)
        tokens = prefix[: rng.randrange(len(prefix) + 1)]
        tokens += [rng.randrange(50, 60) for _ in range(rng.randrange(1, 12))]
        request = Request(
            req_id,
            tokens,
            sampling_params=SamplingParams(
                max_tokens=rng.randrange(1, 16),
                stop_token_ids=frozenset({61} if rng.random() < 0.3 else ()),
                skip_reading_prefix_cache=rng.random() < 0.05,
            ),
            cache_salt=rng.choice(_SALTS),
            lora_request=rng.choice(_ADAPTERS) if rng.random() < 0.3 else None,
            mm_features=random_features(rng, len(tokens)) if rng.random() < 0.4 else (),
            priority=rng.randrange(3),
            arrival_time=arrival_time,
            resumable=rng.random() < 0.1,
        )
        try:
            self.scheduler.add_request(request)
        except ValueError:
            return
        self._tracked[req_id] = TrackedRequest(request, list(tokens), self._epoch)
        if request.resumable:
            self._sessions.add(req_id)

    def _continue_sessions(self) -> None:
        for req_id in sorted(self._sessions & self._tracked.keys()):
            tracked = self._tracked[req_id]
            if not self.scheduler.is_paused(req_id):
                continue
            tokens = [self._rng.randrange(50, 60) for _ in range(self._rng.randrange(1, 8))]
            num_computed = min(tracked.request.num_computed_tokens, len(tracked.tokens))
            features = random_features(self._rng, len(tokens)) if self._rng.random() < 0.3 else ()
            try:
                self.scheduler.continue_session(
                    req_id, tokens, features, SamplingParams(max_tokens=self._rng.randrange(1, 6))
                )
            except ValueError:
                self.scheduler.abort_request(req_id)
                del self._tracked[req_id]
            else:
                tracked.begin_turn(num_computed, tokens)

    def _abort(self) -> None:
        if self._tracked:
            req_id = self._rng.choice(sorted(self._tracked))
            self.scheduler.abort_request(req_id)
            del self._tracked[req_id]

    def _reset(self) -> None:
        """New weights: nothing computed before may be read afterwards."""
        for req_id in sorted(self._sessions & self._tracked.keys()):
            self.scheduler.abort_request(req_id)
            del self._tracked[req_id]
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.result.num_forced_resets += 1
        self._epoch += 1
        for tracked in self._tracked.values():
            tracked.restart(self._epoch)


def random_groups(rng: random.Random) -> list[KVCacheGroupSpec]:
    """Full attention, sliding window, or a hybrid, sometimes with mixed block sizes."""
    size = rng.choice((2, 4))
    window = SlidingWindowSpec(size, sliding_window=rng.choice((size, size + 1, 3 * size)))
    choices: list[Sequence[FullAttentionSpec | SlidingWindowSpec]] = [
        [FullAttentionSpec(size)],
        [FullAttentionSpec(size)],
        [window],
        [FullAttentionSpec(size), window],
        [FullAttentionSpec(2 * size), window],
        [window, FullAttentionSpec(size), SlidingWindowSpec(2 * size, sliding_window=2 * size)],
    ]
    return [KVCacheGroupSpec(spec) for spec in rng.choice(choices)]


def random_config(rng: random.Random) -> SchedulerConfig:
    """Small pools, so that blocks are recycled and requests preempted all the time."""
    use_eagle = rng.random() < 0.25
    return SchedulerConfig(
        num_blocks=rng.choice((24, 36, 56)),
        max_num_seqs=rng.choice((3, 6)),
        max_num_batched_tokens=rng.choice((12, 24, 48)),
        max_model_len=_MAX_MODEL_LEN,
        prefix_caching_hash_algo=rng.choice(("sha256", "sha256_cbor")),
        key_format=KeyFormat.TAGGED,
        policy=rng.choice(list(SchedulingPolicy)),
        watermark=rng.choice((0.0, 0.1)),
        reserve_full_isl=rng.random() < 0.5,
        long_prefill_token_threshold=rng.choice((0, 0, 7)),
        encoder_budget=24,
        encoder_cache_size=24,
        use_eagle=use_eagle,
        num_speculative_tokens=rng.choice((1, 2)) if use_eagle else 0,
    )


def random_features(rng: random.Random, num_tokens: int) -> list[MultimodalFeature]:
    features: list[MultimodalFeature] = []
    offset = rng.randrange(4)
    while True:
        length = rng.randrange(1, 9)
        if offset + length > num_tokens:
            return features
        features.append(MultimodalFeature(f"image{rng.randrange(3)}x{length}", offset, length))
        offset += length + rng.randrange(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    total = TraceResult(arguments.first_seed)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.traces):
        result = OracleTrace(seed).run(arguments.steps)
        total.num_checks += result.num_checks
        total.num_hit_tokens += result.num_hit_tokens
        total.num_preemptions += result.num_preemptions
        total.num_forced_resets += result.num_forced_resets
        total.violations += result.violations
        for violation in result.violations[:1]:
            print(f"seed {seed}: {violation}")
    print(
        f"seeds {arguments.first_seed}..{arguments.first_seed + arguments.traces - 1}: "
        f"{total.num_checks} slots checked, {len(total.violations)} violations, "
        f"{total.num_hit_tokens} hit tokens, {total.num_preemptions} preemptions, "
        f"{total.num_forced_resets} forced resets"
    )


if __name__ == "__main__":
    main()
