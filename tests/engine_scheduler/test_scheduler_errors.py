"""Bad settings, requests and calls are refused by name, and nothing changes (scenario 26)."""

import pytest

from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.kvcache.request import MultimodalFeature, Request, SamplingParams
from support.kv_builders import make_scheduler, run_to_end


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be >= 1, got 0"),
        ({"num_blocks": 1}, "num_blocks must be >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be >= 0"),
        ({"policy": "random"}, "'random' is not a valid SchedulingPolicy"),
        ({"key_format": "v9"}, "'v9' is not a valid KeyFormat"),
        ({"prefix_caching_hash_algo": "md5"}, "prefix_caching_hash_algo must be one of"),
        ({"watermark": 2.0}, "watermark must be in"),
        ({"kv_metrics_sample_rate": 2.0}, "sample_rate must be in"),
    ],
)
def test_bad_settings(settings, message):
    """The error names the setting and the value."""
    with pytest.raises(ValueError, match=message):
        make_scheduler(**settings)


def test_defaults_follow_the_seed():
    """Prefix caching is on, with sha256 and the tagged key format."""
    config = SchedulerConfig(num_blocks=4)
    assert config.enable_prefix_caching
    assert (config.prefix_caching_hash_algo, config.key_format) == ("sha256", "tagged")


@pytest.mark.parametrize("issue", ["39734", "35541"])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "options", "message"),
    [
        (128, 1, {}, "128 prompt tokens leave no room for an output within max_model_len=128"),
        (20, 60, {"num_blocks": 12}, r"need 20 blocks, but the pool has 11: raise num_blocks"),
        (
            80,
            1,
            {"enable_chunked_prefill": False},
            "80 prompt tokens exceed max_num_batched_tokens=64",
        ),
    ],
)
def test_issue_requests_that_can_never_run(issue, num_prompt, max_tokens, options, message):
    """Refused when submitted; the queue keeps moving for the others."""
    scheduler = make_scheduler(**options)
    with pytest.raises(ValueError, match=f"request 'large'.*{message}"):
        scheduler.add_request(
            Request(
                "large",
                [1] * num_prompt,
                sampling_params=SamplingParams(max_tokens=max_tokens),
            )
        )
    small = Request("small", [1] * 8, sampling_params=SamplingParams(max_tokens=2))
    scheduler.add_request(small)
    assert len(run_to_end(scheduler, [small])) == 1


def test_the_largest_request_that_fits_runs():
    """Its last sampled token needs no slot: 11 blocks of 4 hold 20 + 25 tokens."""
    scheduler = make_scheduler(num_blocks=12)
    request = Request("r", range(20), sampling_params=SamplingParams(max_tokens=25))
    scheduler.add_request(request)
    run_to_end(scheduler, [request])
    assert request.num_output_tokens == 25


def test_features_that_no_step_can_encode():
    """Longer than one step's budget or than the cache."""
    scheduler = make_scheduler(encoder_budget=8, encoder_cache_size=16)
    request = Request("r", range(16), mm_features=[MultimodalFeature("image", 2, 9)])
    with pytest.raises(ValueError, match=r"'image' has 9 tokens, more than encoder_budget=8"):
        scheduler.add_request(request)
    assert not scheduler.has_unfinished_requests()


def test_ids_in_use():
    """A second request with the id of a live one is refused; after its end the id is free."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("r", [1, 2]))
    with pytest.raises(ValueError, match="request id 'r' is in use"):
        scheduler.add_request(Request("r", [3]))
    scheduler.abort_request("r")
    scheduler.add_request(Request("r", [3]))


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ({"nobody": [1]}, "request 'nobody' was not scheduled in this step"),
        ({"long": [1]}, r"'long' cannot have sampled tokens: only 61 of its 70"),
    ],
)
def test_tokens_that_cannot_be(sampled, message):
    """Tokens of strangers, or of a request that is still in its prompt; the step can be
    updated properly afterwards."""
    scheduler = make_scheduler()
    scheduler.add_request(Request("short", range(100, 103)))
    scheduler.add_request(Request("long", range(70)))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match=message):
        scheduler.update_from_output(output, sampled | {"short": [1]})
    (result,) = scheduler.update_from_output(output, {"short": [1]}).outputs
    assert result.new_token_ids == [1]


def test_steps_come_back_once_and_in_order():
    """A step that overtakes another, or comes twice, is refused; the right one still counts."""
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=1)
    scheduler.add_request(Request("a", range(8)))
    scheduler.add_request(Request("b", range(50, 54)))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort_request("a")
    third = scheduler.schedule()
    assert list(third.num_scheduled_tokens) == ["b"]
    with pytest.raises(ValueError, match=r"a step of requests \['b'\] is not the oldest"):
        scheduler.update_from_output(third, {"b": [7]})
    for step, sampled in ((first, {}), (second, {}), (third, {"b": [7]})):
        scheduler.update_from_output(step, sampled)
    with pytest.raises(ValueError, match="comes back once"):
        scheduler.update_from_output(third, {"b": [7]})
