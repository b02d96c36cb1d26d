"""Settings and requests: resolution per stage, and clear errors for what cannot work."""

from typing import Any

import pytest

from slotmirror.engine.errors import RequestError
from slotmirror.engine.pipeline_types import (
    STAGES,
    TALKER,
    THINKER,
    PipelineConfig,
    PipelineRequest,
    StageOverrides,
)
from slotmirror.kvcache.request_params import MultimodalFeature


def test_stage_settings_override_the_pipelines() -> None:
    """A stage takes the pipeline's settings except for those that it overrides."""
    config = PipelineConfig(
        num_blocks=100,
        enable_prefix_caching=False,
        thinker=StageOverrides(enable_prefix_caching=True, max_num_seqs=3),
        talker=StageOverrides(num_blocks=50, max_batched_tokens=64),
    )
    thinker, talker = config.stage(THINKER), config.stage(TALKER)
    assert (thinker.enable_prefix_caching, talker.enable_prefix_caching) == (True, False)
    assert (thinker.num_blocks, talker.num_blocks) == (100, 50)
    assert (thinker.max_num_seqs, talker.max_num_seqs) == (3, 32)
    assert (thinker.max_batched_tokens, talker.max_batched_tokens) == (512, 64)


def test_caching_off_switches_both_stages_off() -> None:
    """The reference run has caching off in both stages, overrides or not, and all else equal."""
    config = PipelineConfig(num_blocks=64, talker=StageOverrides(True, num_blocks=32))
    off = config.caching_off()
    assert not any(off.stage(name).enable_prefix_caching for name in STAGES)
    assert [off.stage(name).num_blocks for name in STAGES] == [64, 32]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gpt"}, "model='gpt'"),
        ({"num_blocks": 1}, "num_blocks=1 of stage 'thinker': must be a whole number >= 2"),
        ({"block_size": 0}, "block_size=0"),
        ({"talker": StageOverrides(max_num_seqs=0)}, "max_num_seqs=0 of stage 'talker'"),
        ({"max_batched_tokens": 2.5}, "max_batched_tokens=2.5"),
        ({"handover_lag_steps": -1}, "handover_lag_steps=-1"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    """The error names the setting, its value and, where it matters, the stage."""
    with pytest.raises(RequestError, match=message):
        PipelineConfig(**settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "'r' has an empty prompt"),
        ({"token_ids": [1, 320]}, "token id 320 is outside the vocabulary 0 .. 319"),
        ({"token_ids": [-1]}, "token id -1"),
        ({"token_ids": [1], "max_tokens": 0}, "max_tokens must be >= 1"),
        ({"token_ids": [1], "max_frames": 0}, "max_frames must be >= 1"),
    ],
)
def test_bad_requests_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    """The error names the request and what is wrong with it."""
    with pytest.raises(RequestError, match=message):
        PipelineRequest("r", **fields)


def test_talker_salt_holds_all_that_its_rows_follow_from() -> None:
    """Equal token ids under another salt or image never share a talker block; equal ones do."""
    image = MultimodalFeature("cat", 1, 2)
    moved = MultimodalFeature("cat", 0, 2)
    requests = [
        PipelineRequest("r", [1, 2, 3]),
        PipelineRequest("r", [1, 2, 3], cache_salt="s"),
        PipelineRequest("r", [1, 2, 3], mm_features=(image,)),
        PipelineRequest("r", [1, 2, 3], mm_features=(moved,)),
    ]
    assert [request.stage_salt(THINKER) for request in requests] == [None, "s", None, None]
    assert len({request.stage_salt(TALKER) for request in requests}) == 4
    again = PipelineRequest("other", [9], mm_features=(image,))
    assert again.stage_salt(TALKER) == requests[2].stage_salt(TALKER)


def test_rows_of_a_request() -> None:
    """A stage computes every position but the last decoded token's."""
    request = PipelineRequest("r", [1, 2, 3], max_tokens=4, max_frames=1)
    assert (request.num_rows(THINKER), request.num_rows(TALKER)) == (6, 3)
