"""The whole pipeline: both models, both committers, few blocks, planted faults."""

from dataclasses import replace

import pytest

from slotmirror.core.errors import BackendNotFound
from slotmirror.engine.errors import RequestError
from slotmirror.engine.models.base import CODES_KEY, HIDDEN_KEY
from slotmirror.engine.pipeline import Pipeline
from slotmirror.engine.pipeline_types import (
    STAGES,
    TALKER,
    THINKER,
    PipelineConfig,
    PipelineOutput,
    PipelineRequest,
    PipelineResult,
    StageOverrides,
)
from slotmirror.engine.verify import Verifier, verify_outputs
from support.pipeline_workloads import (
    ShiftingBackend,
    conversations,
    equal_rows,
    long_decodes,
    mixed_requests,
    with_rows,
    with_stage,
)

SMALL = PipelineConfig(
    model="fingerprint", num_blocks=256, block_size=4, max_batched_tokens=64, max_num_seqs=8
)
CROWDED = replace(SMALL, num_blocks=22, max_batched_tokens=32, reserve_full_isl=False)


def serve(config: PipelineConfig, requests: list[PipelineRequest]) -> PipelineResult:
    with Pipeline(config) as pipeline:
        return pipeline.run(requests)


def test_crowded_fingerprints_are_right_and_equal_threaded_and_inline() -> None:
    """Hundreds of preemptions in both stages together, blocks recycled all the time: no mismatch,
    and identical bytes whether rows are moved by a thread or inline (H5)."""
    requests = long_decodes(120)
    threaded, inline = (
        serve(replace(CROWDED, committer=committer), requests)
        for committer in ("threaded", "inline")
    )
    report = verify_outputs(CROWDED, threaded.outputs.values())
    assert report.ok, report.first_mismatches
    assert report.rows_verified == sum(
        2 * request.num_rows(THINKER) + request.num_rows(TALKER) for request in requests
    )
    assert equal_rows(threaded.outputs, inline.outputs)
    for stage in STAGES:
        assert threaded.stages[stage].preemptions == inline.stages[stage].preemptions
        assert threaded.stages[stage].hit_tokens > 0
    assert sum(threaded.stages[stage].preemptions for stage in STAGES) >= 200


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once_is_right(seed: int) -> None:
    """Images cut by hits and chunks, an encoder cache that is too small, salts, chained turns and
    preemptions in one run: every row follows the formula."""
    requests = mixed_requests(60, seed=seed)
    result = serve(CROWDED, requests)
    report = verify_outputs(CROWDED, result.outputs.values())
    assert report.ok, report.first_mismatches
    assert report.requests == 60
    thinker = result.stages[THINKER]
    assert thinker.preemptions > 20
    assert thinker.hit_tokens > 200
    images = {f.identifier for request in requests for f in request.mm_features}
    assert thinker.encoder_calls > len(images)


def test_conversations_hit_their_former_turns_and_verify() -> None:
    """Later turns hit the blocks of earlier ones in both stages; every row is right."""
    requests = conversations(12, 3, system_length=20, turn_length=15)
    result = serve(SMALL, requests)
    report = verify_outputs(SMALL, result.outputs.values())
    assert report.ok, report.first_mismatches
    assert report.requests == len(requests)
    for stage in STAGES:
        counters = result.stages[stage]
        assert counters.prompt_tokens == sum(len(request.token_ids) for request in requests)
        assert counters.hit_tokens > counters.prompt_tokens // 2
        assert counters.hit_tokens + counters.prefill_tokens_computed == counters.prompt_tokens


def test_transformer_agrees_with_a_caching_off_run() -> None:
    """Hidden rows of both layers within 1e-5 relative, codes within a level, hits in between."""
    config = replace(SMALL, model="transformer", block_size=8)
    requests = conversations(6, 3, system_length=40, turn_length=20)
    result = serve(config, requests)
    with Pipeline(config.caching_off()) as pipeline:
        reference = pipeline.run(requests, forced=result.outputs)
    report = verify_outputs(config, result.outputs.values(), reference.outputs)
    assert report.ok, report.first_mismatches
    assert all(result.stages[stage].hit_tokens > 500 for stage in STAGES)
    assert all(reference.stages[stage].hit_tokens == 0 for stage in STAGES)


def test_transformer_survives_preemption() -> None:
    """Resumed requests deliver rows that agree with an uncrowded caching-off run."""
    config = replace(CROWDED, model="transformer", num_blocks=24)
    requests = long_decodes(24)
    result = serve(config, requests)
    roomy = replace(config, num_blocks=256).caching_off()
    with Pipeline(roomy) as pipeline:
        reference = pipeline.run(requests, forced=result.outputs)
    report = verify_outputs(config, result.outputs.values(), reference.outputs)
    assert report.ok, report.first_mismatches
    assert sum(result.stages[stage].preemptions for stage in STAGES) > 20


@pytest.mark.parametrize(("stage", "key"), [(THINKER, HIDDEN_KEY), (TALKER, CODES_KEY)])
def test_a_planted_wrong_row_is_reported(stage: str, key: str) -> None:
    """One number of one delivered row is changed on its way out: exactly that row is reported."""
    verifier = Verifier(SMALL)

    def plant(output: PipelineOutput) -> None:
        if output.req_id == "chat-1/turn-1":
            rows = output.stage(stage).rows[key].clone()
            rows[7, 2] += 1
            output = with_stage(output, stage, with_rows(output.stage(stage), key, rows))
        verifier.add(output)

    with Pipeline(SMALL) as pipeline:
        pipeline.run(conversations(3, 2, system_length=20, turn_length=10), on_output=plant)
    report = verifier.report()
    assert report.mismatches == 1
    [mismatch] = report.first_mismatches
    assert (mismatch.req_id, mismatch.stage, mismatch.key, mismatch.position) == (
        "chat-1/turn-1",
        stage,
        key,
        7,
    )


@pytest.mark.parametrize("broken_gather", [0, 1, 5])
def test_a_row_read_from_a_wrong_slot_is_reported(broken_gather: int) -> None:
    """One gather of the cache reads one neighbouring slot: verification sees it, and a wrong
    hidden row of the thinker is seen again in all talker rows behind it."""
    requests = conversations(3, 2, system_length=20, turn_length=10)
    with Pipeline(SMALL, backend=ShiftingBackend(broken_gather)) as pipeline:
        result = pipeline.run(requests)
    report = verify_outputs(SMALL, result.outputs.values())
    assert report.mismatches >= 1
    assert not report.ok


def test_a_stage_may_switch_its_caching_off() -> None:
    """The pipeline's setting is overridden per stage, and the rows stay right."""
    config = replace(SMALL, talker=StageOverrides(enable_prefix_caching=False))
    result = serve(config, conversations(4, 2, system_length=20, turn_length=10))
    assert result.stages[THINKER].hit_tokens > 0
    assert result.stages[TALKER].hit_tokens == 0
    assert verify_outputs(config, result.outputs.values()).ok


@pytest.mark.parametrize("lag", [0, 5])
def test_handover_lag_changes_no_row(lag: int) -> None:
    """When outputs are fetched from the builders is a matter of schedule, not of content."""
    requests = conversations(6, 2, system_length=20, turn_length=10)
    outputs = serve(SMALL, requests).outputs
    assert equal_rows(outputs, serve(replace(SMALL, handover_lag_steps=lag), requests).outputs)


def test_equal_runs_have_equal_schedules() -> None:
    """Counters do not depend on how fast the builder threads are."""
    requests = long_decodes(30)
    first, second = (serve(CROWDED, requests).stages for _ in range(2))
    for stage in STAGES:
        assert replace(
            first[stage], engine_seconds=0.0, cache_stats={}, memory_stats={}
        ) == replace(second[stage], engine_seconds=0.0, cache_stats={}, memory_stats={})


def test_outputs_stream_and_progress_counts() -> None:
    """With `on_output` nothing is kept; progress is told after every request."""
    streamed: list[str] = []
    progress: list[tuple[int, int]] = []
    with Pipeline(SMALL) as pipeline:
        result = pipeline.run(
            conversations(2, 2, system_length=8, turn_length=4),
            on_output=lambda output: streamed.append(output.req_id),
            progress=lambda done, total: progress.append((done, total)),
        )
    assert result.outputs == {}
    assert len(set(streamed)) == 4
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert streamed.index("chat-0/turn-0") < streamed.index("chat-0/turn-1")


def test_a_later_run_hits_an_earlier_one() -> None:
    """The caches live as long as the pipeline; ids may be used again."""
    requests = conversations(2, 1, system_length=20, turn_length=10)
    with Pipeline(SMALL) as pipeline:
        first = pipeline.run(requests)
        again = pipeline.run(requests)
    assert again.stages[THINKER].hit_tokens > first.stages[THINKER].hit_tokens
    assert equal_rows(first.outputs, again.outputs)
    assert verify_outputs(SMALL, again.outputs.values()).ok


def test_salted_requests_share_with_equal_salts_only() -> None:
    """Equal prompts: another salt misses in both stages, the same salt hits in both."""
    prompt = range(30)
    requests = [
        PipelineRequest("a", prompt, cache_salt="x"),
        PipelineRequest("b", prompt, cache_salt="y", after="a"),
        PipelineRequest("c", prompt, cache_salt="x", after="b"),
    ]
    result = serve(SMALL, requests)
    assert verify_outputs(SMALL, result.outputs.values()).ok
    assert [result.stages[stage].hit_tokens for stage in STAGES] == [28, 28]


def test_requests_that_never_fit_are_refused_before_anything_runs() -> None:
    """The error names request, stage and setting; the pipeline serves the next call."""
    config = replace(SMALL, num_blocks=8)
    with Pipeline(config) as pipeline:
        with pytest.raises(RequestError, match=r"'big' needs 40 .* holds 28: raise num_blocks=8"):
            pipeline.run([PipelineRequest("ok", [1]), PipelineRequest("big", [1] * 24)])
        result = pipeline.run([PipelineRequest("ok", [1])])
    assert result.stages[THINKER].requests == 1


def test_unknown_backend_is_refused() -> None:
    """A backend that is not installed raises the registry's error."""
    with pytest.raises(BackendNotFound, match="no backend 'abacus'"):
        Pipeline(replace(SMALL, backend="abacus"))
