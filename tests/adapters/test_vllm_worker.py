"""The mixin over a plain worker: steps in, whole requests out, on both model runners' shapes."""

from __future__ import annotations

import pytest
import torch

from slotmirror.adapters.errors import DeliveryError, SlotMismatchError
from slotmirror.adapters.vllm import mirror as mirror_module
from slotmirror.adapters.vllm.worker_mixin import StageMirrorMixin
from slotmirror.core.errors import ConfigError, PrefixCacheUnmatchError
from support.vllm_fakes import (
    FakeRunner,
    PlainWorker,
    SchedulerOutput,
    cached,
    kv_cache_config,
    new,
    row,
    vllm_config,
)

GOT = {}


def collect(request):
    GOT[request.req_id] = request


def refuse(request):
    raise ValueError(f"{request.req_id} is not wanted")


class Worker(StageMirrorMixin, PlainWorker):
    def _slotmirror_keeps_rows(self):
        return True


@pytest.fixture
def start(monkeypatch):
    """Starts workers; all are shut down at the end."""
    workers = []
    GOT.clear()
    monkeypatch.setattr(
        "slotmirror.adapters.vllm.open_mirror.callback_named",
        {"collect": collect, "refuse": refuse}.__getitem__,
    )

    def start(runner=None, *, caching=True, kv_cache=None, changes=None, **settings):
        settings = {"sink": "callback", "callback": "collect"} | settings
        config = vllm_config(settings, caching=caching, **(changes or {}))
        worker = Worker(config, runner or FakeRunner())
        workers.append(worker)
        worker.init_device()
        worker.initialize_from_config(kv_cache or kv_cache_config())
        return worker

    yield start
    for worker in workers:
        worker.shutdown()


def step(worker, tokens, **parts):
    worker.execute_model(SchedulerOutput(tokens, **parts))
    worker.sample_tokens(None)


def check(request, content, count):
    expected = torch.stack([row(content, position) for position in range(count)])
    torch.testing.assert_close(request.rows["hidden_states"], expected, rtol=0, atol=0)
    assert request.first_positions["hidden_states"] == 0


@pytest.mark.parametrize("v2", [False, True])
def test_a_hit_delivers_the_whole_prompt(start, v2):
    """Rows come in the runner's order, padded; the second request computes only its tail."""
    worker = start(FakeRunner(v2=v2, padding=3))
    step(
        worker,
        {"p@1": 10, "q@1": 3},
        scheduled_new_reqs=[
            new("p@1", [1, 2, 3], 10),
            new("q@1", [4], 3),
        ],
    )
    hit = new("p@2", [1, 2, 5], 10, computed=8)
    step(
        worker,
        {"p@2": 2, "p@1": 1},
        scheduled_new_reqs=[hit],
        scheduled_cached_reqs=cached(**{"p@1": (10, None)}),
    )
    worker.slotmirror_flush()
    assert set(GOT) == {"p@1", "q@1", "p@2"}
    check(GOT["p@1"], "p", 10)
    check(GOT["p@2"], "p", 10)
    check(GOT["q@1"], "q", 3)
    assert worker.slotmirror_stats()["cache"]["hit_tokens"] == 8


@pytest.mark.parametrize("second_route", [False, True])
def test_a_preempted_prompt_is_delivered_once_and_whole(start, second_route):
    """Preempted in mid-prefill and resumed with a hit, by either route."""
    worker = start()
    step(worker, {"a": 6}, scheduled_new_reqs=[new("a", [1, 2], 9)])
    step(worker, {}, preempted_req_ids={"a"})
    if second_route:
        back = {"scheduled_new_reqs": [new("a", [1, 5, 6], 9, computed=4)]}
    else:
        resumed = cached(a=(4, [1, 5, 6]))
        resumed.resumed_req_ids = {"a"}
        back = {"scheduled_cached_reqs": resumed}
    step(worker, {"a": 5}, **back)
    worker.slotmirror_flush()
    check(GOT["a"], "a", 9)
    assert worker.slotmirror_stats()["sink"]["requests_written"] == 1


def drafted_step(worker, sampled):
    worker.execute_model(
        SchedulerOutput(
            {"a": 3},
            scheduled_cached_reqs=cached(a=(4, [2])),
            scheduled_spec_decode_tokens={"a": [8, 9]},
        )
    )
    worker.sampled = {"a": sampled}
    worker.sample_tokens(None)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("sampled", "count"), [([1], 5), ([1, 2, 3], 7)])
def test_drafts_are_cut_at_what_was_accepted(start, caching, sampled, count):
    """The last step of a request is drafted: its rows end at the accepted tokens (L7)."""
    worker = start(deliver="all", caching=caching, changes={"speculative_config": object()})
    step(worker, {"a": 4}, scheduled_new_reqs=[new("a", [1], 4)])
    drafted_step(worker, sampled)
    worker.slotmirror_flush(end_requests=True)
    check(GOT["a"], "a", count)


def test_rejected_drafts_are_overwritten(start):
    """The positions of rejected drafts come from the step that computed them again."""
    worker = start(deliver="all", changes={"speculative_config": object()})
    step(worker, {"a": 4}, scheduled_new_reqs=[new("a", [1], 4)])
    drafted_step(worker, [1, 2])
    step(worker, {"a": 1}, scheduled_cached_reqs=cached(a=(6, None)))
    step(worker, {}, finished_req_ids={"a"})
    worker.slotmirror_flush()
    check(GOT["a"], "a", 7)
    assert worker.slotmirror_stats()["drafts"] == {"accepted": 1, "rejected": 1}


def test_an_aborted_prompt_is_counted_and_not_delivered(start):
    """Half a prompt is never handed out."""
    worker = start()
    step(worker, {"a": 4}, scheduled_new_reqs=[new("a", [1, 2], 8)])
    step(worker, {}, finished_req_ids={"a"})
    worker.slotmirror_flush()
    assert GOT == {}
    assert worker.slotmirror_stats()["delivery"]["requests_incomplete"] == 1


def test_a_hit_on_rows_from_before_a_reset_spoils_that_request_alone(start):
    """After a sleep the engine must not hit old blocks; if it does, the other request comes."""
    worker = start()
    step(worker, {"p@1": 8}, scheduled_new_reqs=[new("p@1", [1, 2], 8)])
    worker.sleep(2)
    step(
        worker,
        {"p@2": 1, "q@1": 3},
        scheduled_new_reqs=[
            new("p@2", [1, 2, 3], 9, computed=8),
            new("q@1", [4], 3),
        ],
    )
    worker.slotmirror_flush()
    assert set(GOT) == {"p@1", "q@1"}
    assert worker.slotmirror_stats()["delivery"]["last_missing"] == ("p@2",)
    assert "sleep 2" in worker.calls


def test_warm_up_is_not_a_step(start):
    """What the worker runs while it warms up reaches neither cache nor sink (C4)."""
    worker = start()
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.slotmirror_stats()["cache"]["steps_started"] == 0


def test_caching_off_needs_no_pool(start):
    """Every request is delivered, and no slot is kept (G1)."""
    worker = start(caching=False)
    step(worker, {"a": 5}, scheduled_new_reqs=[new("a", [1, 2], 5)])
    worker.slotmirror_flush()
    check(GOT["a"], "a", 5)
    assert worker.slotmirror_stats()["cache"] == {}


def test_a_pooling_stage_has_no_mirror(start):
    """Its worker runs as it is."""
    worker = start(changes={"model_config__runner_type": "pooling"})
    worker.execute_model(SchedulerOutput({"a": 1}, [new("a", [1], 1)]))
    assert worker.slotmirror_stats() is None


def test_slots_that_differ_stop_the_engine(start):
    """Debug mode names request, position and both slots before a row is kept."""
    runner = FakeRunner()
    worker = start(runner, debug_slots=True)
    runner.slots = torch.tensor([8, 4, 5, 99])
    requests = [new("a", [1], 2), new("b", [2], 2)]
    runner.reverse = False
    with pytest.raises(SlotMismatchError, match=r"request 'a', position 0.*slot 8.*says 4"):
        worker.execute_model(SchedulerOutput({"a": 2, "b": 2}, requests))
    assert worker.slotmirror_stats()["cache"]["steps_saved"] == 0


def test_slots_that_agree_pass(start):
    """Compared in the runner's order, padding ignored."""
    runner = FakeRunner(padding=1)
    worker = start(runner, debug_slots=True)
    runner.slots = torch.tensor([8, 9, 4, 5, -1])
    step(worker, {"a": 2, "b": 2}, scheduled_new_reqs=[new("a", [1], 2), new("b", [2], 2)])
    worker.slotmirror_flush()
    assert set(GOT) == {"a", "b"}


def test_a_callback_that_raises_stops_the_engine_with_its_cause(start):
    """At the flush at the latest; the cause is the callback's own error."""
    worker = start(callback="refuse")
    step(worker, {"a": 2}, scheduled_new_reqs=[new("a", [1], 2)])
    with pytest.raises(DeliveryError, match="a is not wanted"):
        worker.slotmirror_flush()


def test_a_refused_stage_leaves_nothing_open(start):
    """The gate's refusal names the setting, before any thread starts."""
    with pytest.raises(PrefixCacheUnmatchError, match="scheduling_policy"):
        start(changes={"scheduler_config__policy": "priority"})


def test_a_wrong_setting_shows_before_the_device_is_touched(start):
    """The name of the setting, and no call of the platform's worker."""
    worker = Worker(vllm_config({"sink": "files"}), FakeRunner())
    with pytest.raises(ConfigError, match="folder"):
        worker.init_device()
    assert worker.calls == []


def test_sizing_again_closes_the_former_mirror(start):
    """An engine that sizes its cache anew starts from nothing."""
    worker = start()
    step(worker, {"a": 2}, scheduled_new_reqs=[new("a", [1], 2)])
    worker.initialize_from_config(kv_cache_config(8))
    assert worker.slotmirror_stats()["cache"]["steps_started"] == 0
    assert set(GOT) == {"a"}


def test_the_row_order_of_both_runners():
    """V2's state has the batch itself; V1's runner has it."""
    runner = FakeRunner(v2=True)
    runner.run(SchedulerOutput({"a": 1, "b": 1}), {"a": 0, "b": 0})
    assert mirror_module.row_order(runner.execute_model_state, runner) == ["b", "a"]
