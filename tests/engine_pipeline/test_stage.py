"""One stage by itself: preemption, aborts, recycled blocks, failures."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from slotmirror.backends.cpu_ref import CpuRefBackend
from slotmirror.core.errors import GatherFailedError
from slotmirror.engine.errors import EngineError, RequestError
from slotmirror.engine.models import fingerprint_formula as formula
from slotmirror.engine.models.base import HIDDEN_KEY, TAPPED_KEY
from slotmirror.engine.models.fingerprint import LEFTOVER_KEY, FingerprintModel
from slotmirror.engine.pipeline_types import StageConfig
from slotmirror.engine.stage import Stage, StageRequest
from slotmirror.engine.stage_output import StageOutput
from support.pipeline_workloads import FailingBackend, all_token_ids

BLOCK = 4


def make_stage(backend: CpuRefBackend | None = None, **settings: Any) -> Stage:
    config = StageConfig(
        name="thinker",
        enable_prefix_caching=settings.pop("enable_prefix_caching", True),
        num_blocks=settings.pop("num_blocks", 24),
        block_size=BLOCK,
        max_batched_tokens=settings.pop("max_batched_tokens", 32),
        max_num_seqs=8,
        reserve_full_isl=False,
    )
    model = FingerprintModel(
        num_blocks=config.num_blocks,
        block_size=BLOCK,
        row_widths={TAPPED_KEY: formula.HIDDEN_WIDTH},
        num_next_tokens=256,
        needs_full_hidden=True,
        device=torch.device("cpu"),
    )
    return Stage(config, model, backend or CpuRefBackend(), **settings)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = make_stage()
    yield stage
    stage.shutdown()


def drain(stage: Stage) -> dict[str, StageOutput]:
    """Step until nothing is left; all outputs."""
    outputs = {}
    while stage.has_work:
        for req_id in stage.step():
            outputs[req_id] = stage.take_output(req_id)
    return outputs


def assert_right(output: StageOutput, salt: str | None = None) -> None:
    """Every row of both keys once, by formula; tokens and leftovers too."""
    tokens = np.array(all_token_ids(output), dtype=np.int64)
    seed = formula.prefix_seed("thinker", salt)
    contents = np.zeros(len(tokens), dtype=np.uint64)
    for key in (HIDDEN_KEY, TAPPED_KEY):
        rows = formula.expected_rows(tokens, seed, contents, key, formula.HIDDEN_WIDTH)[:-1]
        assert torch.equal(output.complete_rows(key, output.num_rows), torch.from_numpy(rows))
    states = formula.prefix_states(tokens, seed, contents)
    decoded = formula.next_tokens(states[len(output.prompt_token_ids) - 1 : -1], 256)
    assert output.output_token_ids == tuple(decoded.tolist())
    leftovers = formula.expected_rows(tokens, seed, contents, LEFTOVER_KEY, formula.HIDDEN_WIDTH)
    assert output.leftovers[-1].position == output.num_rows - 1
    for item in output.leftovers:
        assert np.array_equal(item.value.numpy()[0], leftovers[item.position])


def requests(count: int, seed: int = 0) -> list[StageRequest]:
    rng = random.Random(seed)
    return [
        StageRequest(
            f"r{index}",
            (*[7] * rng.randrange(1, 20), *[index % 250] * rng.randrange(1, 8)),
            max_tokens=rng.randrange(1, 30),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("committer", ["threaded", "inline"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_hundreds_of_preemptions_deliver_every_row_once(
    committer: str, enable_prefix_caching: bool
) -> None:
    """Few blocks: requests are preempted and resumed hundreds of times, blocks recycled, no row
    is lost, doubled or wrong; caching off passes through the same code (L2, L3)."""
    stage = make_stage(
        num_blocks=16, committer=committer, enable_prefix_caching=enable_prefix_caching
    )
    given = requests(220)
    for request in given:
        stage.add(request)
    outputs = drain(stage)
    report = stage.report()
    stage.shutdown()
    assert outputs.keys() == {request.req_id for request in given}
    for output in outputs.values():
        assert_right(output)
    assert report.preemptions >= 200
    assert (report.hit_tokens > 0, report.resumed_hit_tokens > 0) == (enable_prefix_caching,) * 2
    assert report.requests == 220
    assert report.hit_tokens + report.prefill_tokens_computed >= report.prompt_tokens


def test_counters_without_preemption_add_up(stage: Stage) -> None:
    """Hits and computed prefill tokens make the prompts; decodes the rest of the rows."""
    shared = tuple(range(16))
    given = [StageRequest(f"r{i}", (*shared, 100 + i), max_tokens=3) for i in range(3)]
    stage.add(given[0])
    drain(stage)
    for request in given[1:]:
        stage.add(request)
    drain(stage)
    report = stage.report()
    assert (report.requests, report.prompt_tokens, report.hit_tokens) == (3, 51, 32)
    assert (report.prefill_tokens_computed, report.decode_tokens) == (19, 6)
    assert (report.preemptions, report.aborts, report.resumed_hit_tokens) == (0, 0, 0)
    assert report.cache_stats["hit_tokens"] == 32
    assert report.engine_seconds > 0


def test_aborted_requests_leave_their_rows_to_others(stage: Stage) -> None:
    """An abort in mid-prefill hands nothing over, but what it computed is hit later (D3, W3)."""
    prompt = tuple(range(40))
    stage.add(StageRequest("gone", prompt, max_tokens=5))
    stage.step()
    assert stage.abort("gone")
    assert not stage.abort("gone")
    stage.add(StageRequest("heir", (*prompt[:30], 99), max_tokens=4))
    outputs = drain(stage)
    assert outputs.keys() == {"heir"}
    assert_right(outputs["heir"])
    report = stage.report()
    assert (report.aborts, report.hit_tokens) == (1, 28)


def test_an_aborted_id_may_come_again(stage: Stage) -> None:
    """The same id is a new request after its abort, with rows of its own (L1, L4)."""
    stage.add(StageRequest("r", tuple(range(50, 90)), max_tokens=5))
    stage.step()
    stage.abort("r")
    stage.add(StageRequest("r", (1, 2, 3), max_tokens=2))
    [output] = drain(stage).values()
    assert_right(output)


def test_salts_never_share(stage: Stage) -> None:
    """Equal prompts of two salts do not hit one another; equal salts do."""
    prompt = tuple(range(20))
    for req_id, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        stage.add(StageRequest(req_id, prompt, max_tokens=2, cache_salt=salt))
        [output] = drain(stage).values()
        assert_right(output, salt)
    assert stage.report().hit_tokens == 16


def test_forced_tokens_replace_the_models(stage: Stage) -> None:
    """A reference run decodes the given tokens, and its rows follow from them."""
    stage.add(StageRequest("r", (1, 2, 3), max_tokens=4, forced_tokens=(9, 8, 7, 6)))
    [output] = drain(stage).values()
    assert output.output_token_ids == (9, 8, 7, 6)
    contents = np.zeros(6, dtype=np.uint64)
    seed = formula.prefix_seed("thinker", None)
    rows = formula.expected_rows((1, 2, 3, 9, 8, 7), seed, contents, HIDDEN_KEY, 4)
    assert torch.equal(output.rows[HIDDEN_KEY], torch.from_numpy(rows))


def test_a_request_that_can_never_run_changes_nothing(stage: Stage) -> None:
    """Too long a prompt and an id in use are refused; the stage goes on."""
    stage.add(StageRequest("r", (1, 2, 3), max_tokens=2))
    with pytest.raises(RequestError, match=r"stage 'thinker': .*'r'"):
        stage.add(StageRequest("r", (4,), max_tokens=1))
    with pytest.raises(RequestError, match="'long'"):
        stage.add(StageRequest("long", tuple(range(200)), max_tokens=2))
    outputs = drain(stage)
    assert outputs.keys() == {"r"}
    assert_right(outputs["r"])


def test_an_output_is_taken_once(stage: Stage) -> None:
    """Only finished requests have an output, and only until it is taken."""
    stage.add(StageRequest("r", (1, 2, 3), max_tokens=2))
    for _ in range(2):
        with pytest.raises(RequestError, match="no finished output of request 'r'"):
            stage.take_output("r")
        drain(stage)


def test_failed_gather_reaches_the_engine_thread() -> None:
    """What fails on the builder's side is the cause of an error in `take_output` or `step`."""
    stage = make_stage(FailingBackend())
    prompt = tuple(range(20))
    stage.add(StageRequest("a", prompt, max_tokens=1))
    drain(stage)
    stage.add(StageRequest("b", prompt, max_tokens=4))
    with pytest.raises(EngineError, match="stage 'thinker' could not build") as caught:
        drain(stage)
    assert isinstance(caught.value.__cause__, GatherFailedError)
    assert "no such page" in str(caught.value)
    stage.shutdown()


def test_shutdown_with_requests_in_flight() -> None:
    """Shutting down in mid-run joins every thread; twice is harmless."""
    stage = make_stage()
    for request in requests(10):
        stage.add(request)
    for _ in range(5):
        stage.step()
    stage.shutdown()
    stage.shutdown()
