"""slotmirror on the real engine: every scenario in a process of its own, judged here.

Run by `make e2e`, which builds the engine's environment; `SLOTMIRROR_E2E_PYTHON` names its
interpreter. Rows are compared with an independent forward of the same weights and with the engine
without prefix caching.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ["SLOTMIRROR_E2E_PYTHON"]
OVERLAY = [path for path in (os.environ.get("SLOTMIRROR_E2E_OVERLAY"),) if path]
"""An unpacked wheel of another vLLM version, over the environment's own."""
TIMEOUT_S = 300

REFERENCE_MAX = 5e-6
"""float32, another implementation of the same model."""
CHUNKING_MAX = 3e-6
"""float32, the same engine with other shapes."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("model")


def engine_environment(folder: Path) -> dict[str, str]:
    """One thread, no network, caches of its own."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*OVERLAY, str(HERE)]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
    }
    environment.setdefault("VLLM_CACHE_ROOT", str(folder.parent / "vllm-cache"))
    return environment


def run(name: str, folder: Path, *, processes: bool = False) -> dict[str, Any]:
    """The facts of one scenario, in a process of its own; its whole output if it failed."""
    return run_together([name], folder, processes=processes)[name]


def run_together(
    names: list[str], folder: Path, *, processes: bool = False
) -> dict[str, dict[str, Any]]:
    """The facts of scenarios that share a process, since they start no engine."""
    environment = engine_environment(folder)
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    done = subprocess.run(
        [PYTHON, str(HERE / "run_scenario.py"), ",".join(names), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    all_facts: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for name, facts in all_facts.items():
        shown = {key: value for key, value in facts.items() if not isinstance(value, dict)}
        print(f"\n{name}: {shown}", flush=True)
    return all_facts


@pytest.fixture(scope="session")
def without_engine(folder) -> dict[str, dict[str, Any]]:
    """Scenarios over classes and configurations alone."""
    return run_together(["gate", "names_read", "both_runners"], folder)


@pytest.fixture(scope="session")
def omni(folder) -> dict[str, dict[str, Any]]:
    """vLLM-Omni's cache and the drop-in."""
    return run_together(["omni_side_by_side", "omni_installed"], folder)


def check_clean(facts: dict[str, Any], *, hits: int = 1) -> None:
    """Nothing lost, nothing failed, hits were served."""
    stats = facts["stats"]
    assert stats["cache"]["hits"] >= hits
    assert stats["cache"]["failures"] == stats["cache"]["gathers_failed"] == 0
    assert stats["delivery"]["requests_missing_rows"] == 0
    assert stats["sink"]["requests_dropped"] == 0


def test_shared_prefixes_same_step_and_multi_turn(folder):
    """170 requests, two thirds of their prompts hits, equal the reference and the engine without
    caching; a shut-down engine leaves no thread."""
    facts = run("soak", folder)
    check_clean(facts, hits=100)
    assert facts["worst"] <= REFERENCE_MAX
    assert facts["worst_on_off"] <= CHUNKING_MAX
    assert facts["stats"]["cache"]["own_step_hit_tokens"] > 0
    assert facts["stats_off"]["cache"] == {}
    assert facts["threads_left"] == []


def test_samples_and_aborts(folder):
    """All three samples of n = 3 are delivered; aborted requests leave right rows behind."""
    facts = run("samples_and_aborts", folder)
    check_clean(facts, hits=40)
    assert facts["worst"] <= REFERENCE_MAX


def test_chunked_prefill(folder):
    """Prompts that take several steps come whole."""
    facts = run("chunked_prefill", folder)
    check_clean(facts, hits=20)
    assert facts["worst"] <= REFERENCE_MAX
    assert facts["worst_on_off"] <= CHUNKING_MAX


def test_preemption_and_resume(folder):
    """Every position of preempted and resumed requests comes, decode included."""
    facts = run("preemption", folder)
    check_clean(facts, hits=30)
    assert facts["preemptions"] >= 10
    assert facts["worst"] <= REFERENCE_MAX


def test_synchronous_speculative_decoding(folder):
    """Accepted drafts are delivered, rejected ones never are."""
    facts = run("ngram_drafts", folder)
    check_clean(facts)
    assert min(facts["stats"]["drafts"].values()) > 20
    assert facts["worst"] <= REFERENCE_MAX


def test_asynchronous_scheduling(folder):
    """Rows of steps that were scheduled ahead are right, those past a stop stand for no token."""
    facts = run("asynchronous", folder)
    check_clean(facts)
    assert facts["async_scheduling"]
    assert facts["preemptions"] > 0
    assert facts["past_the_end"] > 0
    assert facts["worst"] <= REFERENCE_MAX


def test_bfloat16(folder):
    """Caching on equals caching off to within one rounding of bf16."""
    facts = run("bfloat16", folder)
    check_clean(facts)
    assert facts["worst_on_off"] <= 2**-5
    assert facts["worst"] <= 2**-3


def test_compiled_model(folder):
    """A compiled model's rows are the same."""
    facts = run("inductor", folder)
    check_clean(facts)
    assert facts["worst"] <= REFERENCE_MAX


def test_shared_memory_from_an_engine_process(folder):
    """The consumer takes every request, sees the producer end, and nothing stays."""
    facts = run("shared_memory_from_another_process", folder, processes=True)
    check_clean(facts)
    assert facts["worst"] <= REFERENCE_MAX
    assert (facts["alive_before"], facts["alive_after"]) == (True, False)
    assert not facts["left"]


def test_gather_before_write_is_caught(folder):
    """The negative control: with writes a step late, this comparison fails by far."""
    facts = run("gather_before_write", folder)
    assert facts["worst"] > 0.1


def test_the_classes_have_what_is_read(without_engine):
    """Every attribute that the adapter reads exists on the wheel's classes of both runners."""
    assert without_engine["names_read"]["missing"] == []


def test_both_runners_state_objects(without_engine):
    """V1's and V2's own state classes give the same deliveries, slots compared in every step."""
    facts = without_engine["both_runners"]
    assert facts["wrong_v1"] == facts["wrong_v2"] == []
    assert facts["delivered_v1"] == facts["delivered_v2"] > 50


@pytest.mark.parametrize(("name", "rank"), [("tensor_parallel", 0), ("pipeline_parallel", 1)])
def test_rows_are_kept_once(folder, name, rank):
    """On the first tensor-parallel and the last pipeline rank: whole files of the model's rows."""
    facts = run(name, folder, processes=True)
    check_clean(facts)
    assert facts["kept_on"] == [rank]
    assert facts["not_whole"] == []
    assert facts["worst"] <= REFERENCE_MAX


def test_gate_over_real_configuration(without_engine):
    """What is refused is refused by the name of its setting; the rest is sized."""
    facts = without_engine["gate"]
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


def test_the_example_prints_whole_prompts(folder, tmp_path):
    """Three requests, each file as long as its prompt: 280 tokens and the question."""
    run("model_with_tokenizer", folder / "with-tokenizer")
    environment = engine_environment(folder) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [
            PYTHON,
            str(HERE.parents[1] / "examples" / "vllm_hidden_states.py"),
            str(folder / "with-tokenizer"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = [line.split() for line in done.stdout.splitlines() if ".safetensors" in line]
    assert [rows for _, rows, _ in shown] == ["284", "285", "284"]


# -- vLLM-Omni ------------------------------------------------------------------------------


def test_the_drop_in_gives_what_the_original_gives(omni):
    """Fifteen traces, every output of every step equal; same names, same parameters."""
    facts = omni["omni_side_by_side"]
    assert facts["differences"] == []
    assert facts["signatures"] == []
    assert facts["names_missing"] == ["HIDDEN_KEY", "OmniPrefixCacheController", "PrefixBlockPool"]
    assert facts["steps"] >= 500
    assert facts["hit_tokens"] >= 5_000


def test_the_drop_in_under_the_original_mixin(omni):
    """Installed, the wheel's runner mixin builds and drives it; uninstalled, it is as before."""
    facts = omni["omni_installed"]
    assert facts["manager"] == "slotmirror.adapters.vllm_omni.manager"
    assert facts["wrong_rows"] == 0
    assert facts["restored"]
    assert facts["threads_left"] == []
