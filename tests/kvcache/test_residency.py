"""Sampled life of blocks (spec kv 3)."""

import random

import pytest

from slotmirror.kvcache.residency import ResidencyMetrics, ResidencySample
from support.kv_builders import admit, make_manager, make_request


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return int(self.now * 1e9)


def measured(num_blocks=4, sample_rate=1.0):
    clock = Clock()
    metrics = ResidencyMetrics(sample_rate, clock_ns=clock, rng=random.Random(0))
    return make_manager(num_blocks, observer=metrics), metrics, clock


def use(manager, clock, at, name="r", tokens=range(5)):
    clock.now = at
    request = make_request(name, tokens)
    admit(manager, request)
    manager.free(request)


def test_a_reused_block_reports_lifetime_idle_time_and_gaps():
    """Handed out at 0, hit at 1 and 3, reused at 7: lived 7, idle 4, one gap of 2 seconds."""
    manager, metrics, clock = measured()
    for at in (0.0, 1.0, 3.0):
        use(manager, clock, at)
    metrics.take_samples()
    use(manager, clock, 7.0, "other", [9] * 12)
    assert ResidencySample(7.0, 4.0, (2.0,)) in metrics.take_samples()
    assert metrics.take_samples() == []


def test_at_most_four_accesses_are_remembered():
    """Six hits leave three gaps."""
    manager, metrics, clock = measured()
    for at in range(7):
        use(manager, clock, float(at))
    metrics.take_samples()
    manager.evict_blocks({1})
    assert metrics.take_samples() == [ResidencySample(6.0, 0.0, (1.0, 1.0, 1.0))]


def test_reset_forgets_everything():
    """A reset of the cache is no eviction."""
    manager, metrics, clock = measured()
    use(manager, clock, 0.0)
    metrics.take_samples()
    manager.reset_prefix_cache()
    use(manager, clock, 1.0, "other", [9] * 12)
    assert metrics.take_samples() == []


def test_only_a_share_is_sampled():
    """At a rate of a tenth, about a tenth of 1,000 blocks."""
    manager, metrics, _ = measured(1001, 0.1)
    manager.evict_blocks(set(manager.pool.take(1000)))
    assert 60 < len(metrics.take_samples()) < 140


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_bad_rates_are_refused(rate):
    """The rate is in (0, 1]."""
    with pytest.raises(ValueError, match=rf"sample_rate must be in \(0, 1\], got {rate}"):
        ResidencyMetrics(rate)
