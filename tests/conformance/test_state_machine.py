"""Any sequence of public calls, right ones and wrong ones, against the plain dictionaries."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.delivery_check import DeliveryCheck
from slotmirror.conformance.traces.outputs import page_stamps
from slotmirror.conformance.traces.plain_model import PlainModel
from slotmirror.conformance.traces.rows import HOST_KEY, OPTIONAL_KEYS, RowTable, as_tensor
from slotmirror.conformance.traces.toy_engine import ToyEngine, ToySettings
from slotmirror.conformance.traces.trace import TraceStep
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import (
    CacheShutDownError,
    MissingRowsError,
    PrefixCacheError,
    ReplayOrderError,
    RequestNotInStepError,
    StepStateError,
    UnknownStepError,
    WaitTimeoutError,
)
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy
from support.mutants.every import MUTANTS

DEPTH = 3
ROWS = RowTable(8192)
KEY_SETS = st.frozensets(st.sampled_from(OPTIONAL_KEYS))
SETTINGS = ToySettings(num_blocks=10, block_size=2, prefix_tokens_max=8, draft=0.2, replace=0.08)


class PublicCalls(RuleBasedStateMachine):
    """Inline, so that a call has happened when it returns; engine and consumer in one thread."""

    @initialize(
        seed=st.integers(0, 2**16),
        hidden=st.booleans(),
        deferred=st.frozensets(st.sampled_from(OPTIONAL_KEYS)),
        simulated=st.booleans(),
        prefetch=st.booleans(),
        budget=st.sampled_from([1, 200, 10**6]),
    )
    def make(self, seed, hidden, deferred, simulated, prefetch, budget):
        self.rng = random.Random(seed)
        self.engine = ToyEngine(self.rng, SETTINGS)
        self.backend = SimulatedBackend(seed=seed) if simulated else CpuRefBackend()
        config = PrefixCacheConfig(
            num_blocks=SETTINGS.num_blocks,
            block_size=SETTINGS.block_size,
            staging_depth=DEPTH,
            staging_capacity_tokens=64,
            staging_claim_timeout_s=0.001,
            device_staging_bytes_max=budget,
            copy_chunk_bytes=40,
            prefetch=prefetch,
            committer="inline",
        )
        self.cache = PrefixCacheManager(config, self.backend)
        self.cache.register_policy(
            ModelCachePolicy(needs_full_hidden_states=hidden, deferred_keys=deferred)
        )
        self.model = PlainModel(hidden)
        self.open: TraceStep | None = None
        self.saved: dict[int, TraceStep] = {}

    # -- the engine -------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**16), keys=KEY_SETS, drafts=st.booleans())
    def step(self, seed, keys, drafts):
        """A whole step, in any order of rows, if a page is free for it (S1)."""
        self.start(seed, drafts)
        if self.open is not None:
            self.save(keys, seed)

    @rule(seed=st.integers(0, 2**16))
    def step_without_save(self, seed):
        """A step starts whose forward fails, or whose save comes later (C3)."""
        self.start(seed, False)

    @precondition(lambda self: self.open is not None)
    @rule(keys=KEY_SETS, seed=st.integers(0, 2**16))
    def late_save(self, keys, seed):
        """The save of a step that is still open."""
        self.save(keys, seed)

    def start(self, seed, drafts):
        self.rng.seed(seed)
        events, parts = self.engine.step(last=not drafts)
        step = TraceStep(events=events, parts=parts, order=tuple(p.req_id for p in parts))
        mark = self.model.mark()
        self.cache.new_step_starts(events)
        self.model.start(step, mark)
        self.open = step if parts else None

    def save(self, keys, seed):
        order = list(self.open.order)
        random.Random(seed).shuffle(order)
        hidden = (HIDDEN_KEY,) if self.model.needs_hidden else ()
        step = TraceStep(
            events=self.open.events,
            parts=self.open.parts,
            keys=(*hidden, *sorted(keys)),
            order=tuple(order),
        )
        if len(self.model.unconsumed) == DEPTH:
            with pytest.raises(WaitTimeoutError, match="a free staging page"):
                self.save_now(step)
            return
        step_id = self.save_now(step)
        self.model.save(step_id, step)
        self.saved[step_id] = step
        self.open = None

    def save_now(self, step):
        stamps = page_stamps(step)
        outputs = {key: as_tensor(key, ROWS.rows(key, stamps)) for key in step.keys}
        if isinstance(self.backend, SimulatedBackend):
            outputs = {
                key: tensor if key == HOST_KEY else self.backend.upload(tensor)
                for key, tensor in outputs.items()
            }
        hidden = outputs.pop(HIDDEN_KEY, None)
        return self.cache.save_outputs(
            hidden, outputs, num_tokens_unpadded=len(stamps), req_ids=step.order
        )

    @precondition(lambda self: len(self.saved) > 4)
    @rule()
    def reset(self):
        """R1: all rows are forgotten, steps in flight are not."""
        self.cache.reset()
        self.engine.reset()
        self.model.reset()

    # -- consumers --------------------------------------------------------------------------

    @precondition(lambda self: self.model.unconsumed)
    @rule()
    def materialize_everything(self):
        """All steps that may be consumed now are, in the order of their saves."""
        for step_id in sorted(self.model.unconsumed):
            names = self.model.unconsumed[step_id].parts
            self.consume(step_id, tuple(n for n in names if not self.model.must_miss(step_id, n)))

    @precondition(lambda self: self.model.unconsumed)
    @rule(data=st.data())
    def materialize_some(self, data):
        """Some requests of some step are delivered, or refused for a reason the model knows."""
        step_id = data.draw(st.sampled_from(sorted(self.model.unconsumed)))
        names = tuple(self.model.unconsumed[step_id].parts)
        count = data.draw(st.integers(0, len(names)))
        self.consume(step_id, tuple(data.draw(st.permutations(names))[:count]))

    def consume(self, step_id, names):
        refusal = None
        if self.model.unverified(step_id):
            refusal = StepStateError
        elif self.model.must_wait_for(step_id):
            refusal = ReplayOrderError
        elif any(self.model.must_miss(step_id, name) for name in names):
            refusal = MissingRowsError
        if refusal is not None:
            with pytest.raises(refusal):
                self.cache.materialize(step_id, names)
            return
        self.model.begin(step_id, names)
        out = self.cache.materialize(step_id, names)
        DeliveryCheck(self.model, ROWS, self.saved[step_id]).check(step_id, names, out)
        self.model.consumed(step_id)

    @precondition(lambda self: self.model.unconsumed)
    @rule(data=st.data())
    def discard(self, data):
        """A step is consumed without its rows; they stay in the pool."""
        step_id = data.draw(st.sampled_from(sorted(self.model.unconsumed)))
        self.model.begin(step_id, ())
        self.cache.discard_step(step_id)
        self.model.consumed(step_id)

    # -- misuse -----------------------------------------------------------------------------

    @rule(data=st.data())
    def misuse(self, data):
        """C4, S2: what was not started, is used up or was never given out is refused."""
        if self.open is None:
            with pytest.raises(StepStateError, match="without an open step"):
                self.cache.save_outputs(None, {"layer": torch.zeros(1, 3)}, num_tokens_unpadded=1)
        used = sorted(set(self.saved) - set(self.model.unconsumed))
        step_id = data.draw(st.sampled_from([*used, 10**6]))
        for call in (self.cache.materialize, self.cache.discard_step):
            with pytest.raises(UnknownStepError):
                call(step_id)
        if self.model.unconsumed:
            with pytest.raises(RequestNotInStepError, match="stranger"):
                self.cache.materialize(min(self.model.unconsumed), ["stranger"])
        self.cache.quiesce(1.0)

    # -- what always holds ------------------------------------------------------------------

    @invariant()
    def pages_belong_to_unconsumed_steps(self):
        """Inline every write is over, so only steps hold pages; none is lost or left over."""
        stats = self.cache.stats()
        assert stats["unconsumed_steps"] == sorted(self.model.unconsumed)
        assert stats["pages_held"] == len(self.model.unconsumed)
        assert stats["log_length"] == 0
        assert stats["failures"] == 0

    def teardown(self):
        """S3: everything is given back, and every later call raises."""
        if not hasattr(self, "cache"):
            return
        self.cache.shutdown()
        self.cache.shutdown()
        memory = self.cache.memory_stats()
        assert memory["pool_bytes"] == memory["staging_bytes"] == 0
        assert memory["deferred_device_bytes"] == 0
        for call in (self.cache.reset, lambda: self.cache.materialize(1)):
            with pytest.raises(CacheShutDownError):
                call()
        if isinstance(self.backend, SimulatedBackend):
            assert self.backend.violations == []
            assert self.backend.open_host_bytes == 0


EXAMPLES = settings(max_examples=80, stateful_step_count=50)
TestPublicCalls = PublicCalls.TestCase
TestPublicCalls.settings = EXAMPLES


@pytest.mark.parametrize("bug", [2, 24, 25, 27, 30])
def test_the_machine_notices_what_one_thread_can_see(bug: int) -> None:
    """Historical bugs that need no second thread are found by the calls alone."""
    [mutant] = [mutant for mutant in MUTANTS if mutant.bug == bug]
    generate = settings(EXAMPLES, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.MonkeyPatch.context() as patches:
        mutant.patch(patches)
        with pytest.raises((AssertionError, pytest.fail.Exception, PrefixCacheError)):
            run_state_machine_as_test(PublicCalls, settings=generate)
