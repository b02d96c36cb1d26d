"""slotmirror on the real engine: what each scenario must have shown.

Run by `make e2e`. Rows are compared with an independent forward of the same weights and with the
engine without prefix caching.
"""

from __future__ import annotations

from typing import Any

import pytest

REFERENCE_MAX = 5e-6
"""float32, another implementation of the same model."""
CHUNKING_MAX = 3e-6
"""float32, the same engine with other shapes."""


def check_clean(facts: dict[str, Any], *, hits: int = 1) -> None:
    """Nothing lost, nothing failed, hits were served."""
    stats = facts["stats"]
    assert stats["cache"]["hits"] >= hits
    assert stats["cache"]["failures"] == stats["cache"]["gathers_failed"] == 0
    assert stats["delivery"]["requests_missing_rows"] == 0
    assert stats["sink"]["requests_dropped"] == 0


@pytest.mark.scenario("soak")
def test_shared_prefixes_same_step_and_multi_turn(facts):
    """170 requests, two thirds of their prompts hits, equal the reference and the engine without
    caching; a shut-down engine leaves no thread."""
    check_clean(facts, hits=100)
    assert facts["worst"] <= REFERENCE_MAX
    assert facts["worst_on_off"] <= CHUNKING_MAX
    assert facts["keys"] == ["hidden_states", "hidden_states.layer_0"]
    assert facts["stats"]["cache"]["own_step_hit_tokens"] > 0
    assert facts["stats_off"]["cache"] == {}
    assert facts["threads_left"] == []


@pytest.mark.scenario("samples_and_aborts")
def test_samples_and_aborts(facts):
    """All three samples of n = 3 are delivered; aborted requests leave right rows behind."""
    check_clean(facts, hits=40)
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("chunked_prefill")
def test_chunked_prefill(facts):
    """Prompts that take several steps come whole."""
    check_clean(facts, hits=20)
    assert facts["worst"] <= REFERENCE_MAX
    assert facts["worst_on_off"] <= CHUNKING_MAX


@pytest.mark.scenario("preemption")
def test_preemption_and_resume(facts):
    """Every position of preempted and resumed requests comes, decode included."""
    check_clean(facts, hits=30)
    assert facts["preemptions"] >= 10
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("ngram_drafts")
@pytest.mark.engine_fault("0.30.0", "Cannot inspect kernel parameters")
def test_synchronous_speculative_decoding(facts):
    """Accepted drafts are delivered, rejected ones never are."""
    check_clean(facts)
    assert min(facts["stats"]["drafts"].values()) > 20
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("asynchronous")
def test_asynchronous_scheduling(facts):
    """Rows of steps that were scheduled ahead are right, those past a stop stand for no token."""
    check_clean(facts)
    assert facts["async_scheduling"]
    assert facts["preemptions"] > 0
    assert facts["past_the_end"] > 0
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("bfloat16")
def test_bfloat16(facts):
    """Caching on equals caching off to within one rounding of bf16."""
    check_clean(facts)
    assert facts["worst_on_off"] <= 2**-5
    assert facts["worst"] <= 2**-3


@pytest.mark.scenario("inductor")
def test_compiled_model(facts):
    """A compiled model's rows are the same."""
    check_clean(facts)
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("shared_memory_from_another_process")
def test_shared_memory_from_an_engine_process(facts):
    """The consumer takes every request, sees the producer end, and nothing stays."""
    check_clean(facts)
    assert facts["worst"] <= REFERENCE_MAX
    assert (facts["alive_before"], facts["alive_after"]) == (True, False)
    assert not facts["left"]


@pytest.mark.scenario("gather_before_write")
def test_gather_before_write_is_caught(facts):
    """The negative control: with writes a step late, this comparison fails by far."""
    assert facts["worst"] > 0.1


@pytest.mark.scenario("wrong_slots")
def test_a_slot_that_differs_stops_the_engine(facts):
    """The guard's negative control: the first wrong row, its position, and both slots."""
    assert "row 7 of 40" in facts["report"]
    assert "position 7" in facts["report"]
    assert "2 rows of this step differ" in facts["report"]


@pytest.mark.scenario("names_read")
def test_the_classes_have_what_is_read(facts):
    """Every attribute that the adapter reads exists on the wheel's classes of both runners."""
    assert facts["missing"] == []


@pytest.mark.scenario("both_runners")
def test_both_runners_state_objects(facts):
    """V1's and V2's own state classes give the same deliveries, slots compared in every step."""
    assert facts["wrong_v1"] == facts["wrong_v2"] == []
    assert facts["delivered_v1"] == facts["delivered_v2"] > 50


@pytest.mark.parametrize(
    ("rank", "keys"),
    [
        pytest.param(
            0,
            ["hidden_states", "hidden_states.layer_0"],
            id="tensor",
            marks=pytest.mark.scenario("tensor_parallel"),
        ),
        pytest.param(
            1,
            ["hidden_states"],
            id="pipeline",
            marks=pytest.mark.scenario("pipeline_parallel"),
        ),
    ],
)
def test_rows_are_kept_once(facts, rank, keys):
    """On the first tensor-parallel and the last pipeline rank: whole files of the model's rows."""
    check_clean(facts)
    assert facts["kept_on"] == [rank]
    assert facts["keys"] == keys
    assert facts["not_whole"] == []
    assert facts["worst"] <= REFERENCE_MAX


@pytest.mark.scenario("data_parallel")
def test_replicas_are_independent(facts):
    """Both serve, each request comes once and whole, names in shared memory do not meet."""
    assert facts["not_once"] == []
    assert min(facts["by_replica"]) > 0
    assert facts["worst"] <= REFERENCE_MAX
    assert facts["alive"] == [True, True]
    assert not facts["left"]


@pytest.mark.scenario("gate")
def test_gate_over_real_configuration(facts):
    """What is refused is refused by the name of its setting; the rest is sized."""
    sized = [40, 32, 384, 4]
    served = ("plain", "async", "kernel splits", "latent attention", "drafts", "producer")
    assert {name: facts.pop(name) for name in served} == dict.fromkeys(served, sized)
    assert {name: facts[name] for name in facts if name != "threads_left"} == {
        "caching off": "off",
        "pooling": "off",
        "priority": "scheduling_policy",
        "kernel does not divide": "kernel_block_size",
        "two groups": "kv_groups",
        "sliding window": "kv_groups",
        "hits below a block": "hit_unit_tokens",
        "drafts and async": "async_scheduling",
        "drafts on device": "speculative_config.method",
        "consumer": "kv_role",
        "both": "kv_role",
        "decode context": "decode_context_parallel_size",
        "prefill context": "prefill_context_parallel_size",
        "fast prefill": "kv_sharing_fast_prefill",
        "fast prefill, caching off": "kv_sharing_fast_prefill",
    }


@pytest.mark.scenario("example")
def test_the_example_prints_whole_prompts(facts):
    """Three requests, each file as long as its prompt: 280 tokens and the question."""
    assert [rows for _, rows, _ in facts["files"]] == ["284", "285", "284"]


def test_everything_was_compared(outcomes):
    """More than 500 requests in all, and how far the worst float32 row of them was off."""
    exact = {
        name: outcome["facts"]
        for name, outcome in outcomes.items()
        if "worst" in outcome.get("facts", {}) and name not in ("bfloat16", "gather_before_write")
    }
    requests = sum(facts["requests"] for facts in exact.values())
    worst = max(facts["worst"] for facts in exact.values())
    on_off = max(facts.get("worst_on_off", 0.0) for facts in exact.values())
    print(f"\n{requests} requests: maximum difference {worst:.2g}, caching on and off {on_off:.2g}")
    assert requests > 500
    assert worst <= REFERENCE_MAX
