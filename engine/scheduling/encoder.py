"""Which encoder inputs a step must compute for the tokens it schedules (spec kv 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.encoder_cache import EncoderCacheManager
from slotmirror.engine.scheduling.plan import StepPlan
from slotmirror.kvcache.request import Request
from slotmirror.kvcache.request_params import MultimodalFeature


@dataclass(frozen=True)
class EncoderPlan:
    """Encoder inputs (feature indices) to compute, and the tokens that may be scheduled then."""

    num_new_tokens: int
    inputs: list[int]


class EncoderScheduler:
    """Schedules features that overlap a step's tokens and have no output yet.

    An input is computed whole. Where the budget or the cache has no room for one, only the
    tokens before it are scheduled; if the step starts inside it, none.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cache = EncoderCacheManager(config.encoder_cache_tokens)
        self._budget = config.encoder_budget_tokens
        self._whole_inputs_only = config.disable_chunked_mm_input
        # A draft head reads one position further than the target model.
        self._shift = int(config.use_eagle)

    def check_fits(self, req_id: str, features: Sequence[MultimodalFeature]) -> None:
        """Raise ValueError for a feature that no step could ever compute."""
        limit = min(self._budget, self.cache.capacity_tokens)
        for feature in features:
            if feature.length > limit:
                raise ValueError(
                    f"request {req_id!r}: multimodal feature {feature.identifier!r} "
                    f"has {feature.length} tokens, more than encoder_budget={self._budget} or "
                    f"encoder_cache_size={self.cache.capacity_tokens} allows"
                )

    def plan(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, budget: int
    ) -> EncoderPlan:
        """Inputs for tokens [computed, computed + new), within `budget` placeholder tokens.

        Keeps existing outputs for the request (`release_all` undoes it) and may drop unused ones.
        """
        inputs: list[int] = []
        hashes: set[str] = set()
        num_planned = 0
        end = num_computed_tokens + num_new_tokens + self._shift
        for i, feature in enumerate(request.mm_features):
            if feature.end <= num_computed_tokens or not num_new_tokens:
                continue
            if feature.offset >= end:
                break
            if feature.identifier in hashes or self.cache.acquire(request, i):
                continue
            gap = max(0, feature.offset - num_computed_tokens - self._shift)
            is_cut = num_computed_tokens < feature.offset and (
                num_computed_tokens + num_new_tokens < feature.end
            )
            if self._whole_inputs_only and is_cut:
                return EncoderPlan(gap, inputs)
            if feature.length > budget or not self.cache.make_room(feature.length + num_planned):
                return EncoderPlan(gap, inputs)
            if num_computed_tokens + num_new_tokens <= feature.offset:
                continue
            inputs.append(i)
            hashes.add(feature.identifier)
            num_planned += feature.length
            budget -= feature.length
        return EncoderPlan(num_new_tokens, inputs)

    def commit(self, request: Request, inputs: list[int]) -> None:
        """Reserve room for inputs of a plan that is carried out."""
        for i in inputs:
            self.cache.allocate(request, i)

    def reassign(
        self, plan: StepPlan, victim: Request, inputs: list[int], current: Request
    ) -> None:
        """Encoder inputs that a request preempted in its own step will not compute.

        Another request of the step that counts on the same output computes it instead; without
        one the output does not exist, though the cache had promised it.
        """
        for input_id in inputs:
            mm_hash = victim.mm_features[input_id].identifier
            for heir in (*plan.running, current):
                own_input = self.cache.input_with(heir, mm_hash)
                if own_input is not None:
                    plan.add_encoder_input(heir, own_input)
                    break
            else:
                self.cache.forget(mm_hash)

    def release_passed(self, request: Request) -> None:
        """Let go of outputs whose placeholders are computed and cannot be read again."""
        passed = request.num_computed_tokens - self._shift
        for i in sorted(self.cache.inputs_of(request)):
            if request.mm_features[i].end <= passed:
                self.cache.release(request, i)
