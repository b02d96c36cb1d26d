"""The seed's multimodal-tail example through the whole engine.

Section "What About Multimodal Inputs?": block size 4, an image of six tokens followed by "foo" in
the first request and by "bar baz" in the second. Block 1 holds four of the image's tokens; block
2 was never full, so it is computed anew, with embeddings from the encoder cache.
"""

import pytest

from slotmirror.engine.errors import EngineError
from slotmirror.engine.models.base import HIDDEN_KEY
from slotmirror.engine.pipeline import Pipeline
from slotmirror.engine.pipeline_types import (
    TALKER,
    THINKER,
    ModelKind,
    PipelineConfig,
    PipelineRequest,
)
from slotmirror.engine.verify import verify_outputs
from slotmirror.kvcache.request_params import MultimodalFeature

IMAGE, FOO, BAR, BAZ = 300, 65, 66, 67


def request(req_id: str, image: str, tail: list[int], after: str | None) -> PipelineRequest:
    return PipelineRequest(
        req_id,
        [IMAGE] * 6 + tail,
        max_tokens=1,
        max_frames=1,
        mm_features=(MultimodalFeature(image, 0, 6),),
        after=after,
    )


@pytest.mark.parametrize("model", ["fingerprint", "transformer"])
def test_second_tail_hits_block_one_and_calls_no_encoder(model: ModelKind) -> None:
    """The same image with another tail: 4 tokens hit in both stages, 4 computed, 0 more encoder
    calls, and all 8 rows are those of a run with caching off."""
    config = PipelineConfig(model=model, num_blocks=8, block_size=4)
    first = request("foo", "cat", [FOO], None)
    second = request("bar baz", "cat", [BAR, BAZ], "foo")
    with Pipeline(config) as pipeline:
        before = pipeline.run([first])
        after = pipeline.run([request("bar baz", "cat", [BAR, BAZ], None)])
    with Pipeline(config.caching_off()) as pipeline:
        reference = pipeline.run([first, second], forced={**before.outputs, **after.outputs})
    assert before.stages[THINKER].encoder_calls == 1
    assert after.stages[THINKER].encoder_calls == 1
    for stage in (THINKER, TALKER):
        assert before.stages[stage].hit_tokens == 0
        assert after.stages[stage].hit_tokens == 4
        assert after.stages[stage].prefill_tokens_computed == 7 + 4
    assert after.outputs["bar baz"].thinker.complete_rows(HIDDEN_KEY, 8).shape[0] == 8
    outputs = [before.outputs["foo"], after.outputs["bar baz"]]
    needed = reference.outputs if model == "transformer" else None
    report = verify_outputs(config, outputs, needed)
    assert report.ok
    assert report.rows_verified == 3 * (7 + 8)


@pytest.mark.parametrize("model", ["fingerprint", "transformer"])
def test_another_image_shares_nothing(model: ModelKind) -> None:
    """Equal placeholder tokens with another content hash: no hit in either stage, one more
    encoder call, other rows."""
    config = PipelineConfig(model=model, num_blocks=16, block_size=4)
    requests = [request("a", "cat", [FOO], None), request("b", "dog", [FOO], "a")]
    with Pipeline(config) as pipeline:
        result = pipeline.run(requests)
    assert result.stages[THINKER].encoder_calls == 2
    assert [result.stages[stage].hit_tokens for stage in (THINKER, TALKER)] == [0, 0]
    rows = [result.outputs[req_id].thinker.rows[HIDDEN_KEY] for req_id in "ab"]
    assert (rows[0] != rows[1]).any(dim=1).all()


def test_image_across_chunks_is_encoded_once() -> None:
    """An image that two chunks share is encoded once, and its rows follow the formula."""
    config = PipelineConfig(model="fingerprint", num_blocks=16, block_size=4, max_batched_tokens=8)
    prompt = [1, 2, 3, 4, 5, *[IMAGE] * 6, 9, 9]
    features = (MultimodalFeature("cat", 5, 6),)
    with Pipeline(config) as pipeline:
        result = pipeline.run([PipelineRequest("r", prompt, mm_features=features)])
    assert result.stages[THINKER].encoder_calls == 1
    assert verify_outputs(config, result.outputs.values()).ok


def test_one_content_hash_has_one_length() -> None:
    """Two features of one hash and different lengths are refused by name, not cut or padded."""
    config = PipelineConfig(model="fingerprint", num_blocks=16, block_size=4)
    features = (MultimodalFeature("cat", 0, 6), MultimodalFeature("cat", 6, 3))
    with (
        Pipeline(config) as pipeline,
        pytest.raises(EngineError, match="'cat' has 6 embeddings for 3 placeholders"),
    ):
        pipeline.run([PipelineRequest("r", [IMAGE] * 9, mm_features=features)])
