"""Every historical bug, put back: the quiet trace does not notice, the explorer does."""

from __future__ import annotations

import pytest

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.conformance.quiet import quiet_core
from slotmirror.conformance.simulated import SimulatedBackend
from slotmirror.conformance.traces.rows import SPECS
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.events import AdmittedRequest, StepEvents
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.policy import ModelCachePolicy
from support.mutants import insides
from support.mutants.every import BY_A_TEST_OF_ITS_OWN, MUTANTS
from support.mutants.mutant import Mutant, hunt, play_quietly


def named(mutant: Mutant) -> str:
    return f"{mutant.bug}-{mutant.name}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_the_quiet_trace_does_not_notice(mutant: Mutant) -> None:
    """Misses, hits, recycled blocks and deferred rows without overlap are served as ever."""
    with quiet_core():
        assert play_quietly(mutant) > 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_the_explorer_catches_it(mutant: Mutant) -> None:
    """By wrong bytes or a broken invariant, not by an exception of the mutant's own."""
    catch = hunt(mutant)
    assert catch is not None
    assert catch.by in ("bytes", "invariant"), catch.report


def test_every_historical_bug_has_its_mutant() -> None:
    """The list of them goes from 1 to 32."""
    assert {mutant.bug for mutant in MUTANTS} | BY_A_TEST_OF_ITS_OWN == set(range(1, 33))


def allocations_after_preallocate() -> int:
    """Host allocations of the first step of a cache whose keys were opened beforehand."""
    backend = SimulatedBackend()
    cache = PrefixCacheManager(
        PrefixCacheConfig(num_blocks=2, block_size=2, staging_capacity_tokens=4), backend
    )
    deferred = frozenset({"codes.audio"})
    cache.register_policy(ModelCachePolicy(deferred_keys=deferred))
    keys = [HIDDEN_KEY, "codes.audio", "layer"]
    cache.preallocate([SPECS[key] for key in keys])
    made = 0
    allocate = backend.alloc_host

    def counted(*arguments, **settings):  # type: ignore[no-untyped-def]
        nonlocal made
        made += 1
        return allocate(*arguments, **settings)

    backend.alloc_host = counted  # type: ignore[method-assign]
    cache.new_step_starts(first_step())
    outputs = {
        key: backend.empty((2, *SPECS[key].trailing_shape), SPECS[key].dtype) for key in keys
    }
    hidden = outputs.pop(HIDDEN_KEY)
    cache.discard_step(cache.save_outputs(hidden, outputs, num_tokens_unpadded=2))
    cache.shutdown()
    return made


def first_step() -> StepEvents:
    """One new request of two tokens."""
    return BlockTables(num_blocks=2, block_size=2).step(
        new=[AdmittedRequest("a", 0, (0,))],
        num_scheduled_tokens={"a": 2},
        num_computed_tokens={"a": 0},
    )


def test_bug_20_nothing_is_allocated_on_the_hot_path_after_preallocate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pool, pages and bounce buffers are there before the first step; with the bug they are made
    again."""
    assert allocations_after_preallocate() == 0
    preallocate = PrefixCacheManager.preallocate

    def forgotten(self, keys):  # type: ignore[no-untyped-def]
        plan = preallocate(self, keys)
        insides.forget_opened_keys(self)
        return plan

    monkeypatch.setattr(PrefixCacheManager, "preallocate", forgotten)
    assert allocations_after_preallocate() > 0
