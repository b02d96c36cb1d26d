"""The drop-in under vLLM-Omni's names; `make e2e` drives it beside the original."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slotmirror.adapters import vllm_omni
from slotmirror.adapters.vllm_omni import switch
from slotmirror.adapters.vllm_omni.replacements import REPLACEMENTS
from slotmirror.core.errors import PrefixCacheUnmatchError, StepStateError, WaitTimeoutError
from slotmirror.core.key_spec import HIDDEN_KEY
from support.vllm_fakes import FullAttentionSpec, SchedulerOutput, cached, new, row

omni = SimpleNamespace(**REPLACEMENTS)


class View:
    block_size = 4
    device = torch.device("cpu")

    def __init__(self):
        self.order = []

    def batch_req_ids(self):
        return list(self.order)


@pytest.fixture
def view():
    return View()


@pytest.fixture
def manager(view):
    config = omni.PrefixCacheConfig(16, 4, staging_claim_timeout_s=0.01)
    manager = omni.OmniPrefixCacheManager(config, view)
    yield manager
    manager.shutdown()
    manager.shutdown()


def step(manager, view, parts, extra=None, **output):
    """Run `{req_id: (first, count)}`; rows come in the reverse of the scheduler's order."""
    view.order = list(parts)[::-1]
    manager.new_step_starts(SchedulerOutput({r: n for r, (_, n) in parts.items()}, **output))
    rows = [row(r, first + i) for r in view.order for first, n in [parts[r]] for i in range(n)]
    outputs = {"layer_1": torch.stack(rows) * 2} | (extra or {})
    return manager.save_outputs(
        torch.stack([*rows, torch.zeros(4)]),
        outputs,
        num_tokens_unpadded=len(rows),
        num_tokens_padded=len(rows) + 1,
    )


def expected(content, first, end):
    return torch.stack([row(content, position) for position in range(first, end)])


def test_a_hit_is_merged(manager, view):
    """As dictionaries, hidden rows and every key, in the runner's order of rows."""
    new_requests = [new("p@1", [1, 2, 3], 10), new("q@1", [4], 3)]
    first = step(manager, view, {"p@1": (0, 10), "q@1": (0, 3)}, scheduled_new_reqs=new_requests)
    manager.discard_step(first)
    hit = [new("p@2", [1, 2, 5], 10, computed=8)]
    second = step(manager, view, {"p@2": (8, 2)}, scheduled_new_reqs=hit)
    outputs = manager.materialize(second, ["p@2"])
    assert torch.equal(outputs.hidden_states["p@2"], expected("p", 0, 10))
    assert torch.equal(outputs.mm_outputs["layer_1"]["p@2"], expected("p", 0, 10) * 2)


def test_leftovers_are_cut_for_their_request(manager, view):
    """Nested tensors with the step's rows are cut, others copied whole, the rest passed on."""
    extra = {
        "nested": {"rows": torch.arange(4), "deep": {"whole": torch.ones(9)}, "text": "x"},
        "list": [torch.ones(2), 3],
        "flat": torch.arange(4),
    }
    parts = {"a": (0, 3), "b": (0, 1)}
    requests = [new("a", [1], 3), new("b", [2], 1)]
    step_id = step(manager, view, parts, extra, scheduled_new_reqs=requests)
    mm = manager.materialize(step_id, ["a", "b"]).mm_outputs
    assert [mm["nested"][r]["rows"].tolist() for r in ("a", "b")] == [[1, 2, 3], [0]]
    assert mm["flat"]["a"].tolist() == [1, 2, 3]
    assert mm["nested"]["b"]["text"] == "x"
    one, other = mm["nested"]["a"]["deep"]["whole"], mm["nested"]["b"]["deep"]["whole"]
    assert one.data_ptr() != other.data_ptr()
    assert mm["list"]["a"][0].data_ptr() != mm["list"]["b"][0].data_ptr()


def test_a_key_that_only_the_hit_has_is_left_out(manager, view):
    """The returned tuple could not say which positions its rows are."""
    rows = {"codes": torch.ones(4, 2)}
    step(manager, view, {"p@1": (0, 4)}, rows, scheduled_new_reqs=[new("p@1", [1], 4)])
    hit = [new("p@2", [1, 2], 5, computed=4)]
    step_id = step(manager, view, {"p@2": (4, 1)}, scheduled_new_reqs=hit)
    assert set(manager.materialize(step_id, ["p@2"]).mm_outputs) == {"layer_1"}


def test_a_policy_may_opt_out_of_hidden_rows(manager, view):
    """None, as there; a deferred key is delivered with its step."""
    manager.register_policy(omni.ModelCachePolicy(False, frozenset({"layer_1"})))
    step_id = step(manager, view, {"a": (0, 4)}, scheduled_new_reqs=[new("a", [1], 4)])
    outputs = manager.materialize(step_id, ["a"])
    assert outputs.hidden_states is None
    assert torch.equal(outputs.mm_outputs["layer_1"]["a"], expected("a", 0, 4) * 2)


def test_errors_are_of_the_one_class_that_callers_know(manager, view):
    """A second use, a wrong count, an unknown request: with our error as the cause."""
    step_id = step(manager, view, {"a": (0, 4)}, scheduled_new_reqs=[new("a", [1], 4)])
    manager.discard_step(step_id)
    with pytest.raises(omni.OmniPrefixCacheUnmatchError, match="already consumed") as caught:
        manager.materialize(step_id, ["a"])
    assert isinstance(caught.value.__cause__, StepStateError)
    assert isinstance(caught.value, RuntimeError | PrefixCacheUnmatchError)
    unknown = SchedulerOutput({"x": 1}, scheduled_cached_reqs=cached(x=(3, None)))
    with pytest.raises(omni.OmniPrefixCacheUnmatchError, match="'x'"):
        manager.new_step_starts(unknown)


def test_a_full_ring_of_pages_times_out_by_its_own_class(manager, view):
    """Four steps are unconsumed; the fifth names them."""
    requests = [new("a", [1, 2], 5)]
    step(manager, view, {"a": (0, 1)}, scheduled_new_reqs=requests)
    for first in range(1, 4):
        step(manager, view, {"a": (first, 1)}, scheduled_cached_reqs=cached(a=(first, None)))
    with pytest.raises(omni.OmniPrefixCacheStagingTimeoutError, match=r"\[1, 2, 3, 4\]") as caught:
        step(manager, view, {"a": (4, 1)}, scheduled_cached_reqs=cached(a=(4, None)))
    assert isinstance(caught.value.__cause__, WaitTimeoutError)


def gate(groups=None, pooling=False, speculative=None, transfer=None, scheduler=None, **cache):
    cache = {"enable_prefix_caching": True, "block_size": 4, "prefix_match_unit": None} | cache
    groups = [FullAttentionSpec()] if groups is None else groups
    return omni.stage_prefix_cache_config(
        kv_cache_config=SimpleNamespace(
            num_blocks=16, kv_cache_groups=[SimpleNamespace(kv_cache_spec=g) for g in groups]
        ),
        cache_config=SimpleNamespace(**cache),
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(
            **{"max_num_batched_tokens": 99, "policy": "fcfs"} | (scheduler or {})
        ),
        model_config=SimpleNamespace(max_model_len=50),
        is_pooling_model=pooling,
        speculative_config=speculative,
    )


def test_the_gate_sizes_the_cache():
    """From the scheduler; a stage without a cache has none."""
    assert gate() == omni.PrefixCacheConfig(16, 4, staging_capacity_tokens=99)
    assert gate(scheduler={"max_num_batched_tokens": None}).staging_capacity_tokens == 50
    assert gate(pooling=True) is None
    assert gate(enable_prefix_caching=False) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"groups": []}, "kv_groups"),
        ({"groups": [FullAttentionSpec(), FullAttentionSpec()]}, "kv_groups"),
        ({"groups": [SimpleNamespace(block_size=4)]}, "kv_groups"),
        ({"speculative": object()}, "speculative_decoding"),
        ({"transfer": SimpleNamespace(is_kv_consumer=True, kv_role="kv_both")}, "kv_both"),
        ({"prefix_match_unit": 2}, "hit_unit_tokens"),
        ({"scheduler": {"policy": "priority"}}, "scheduling_policy"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
    ],
)
def test_the_gate_refuses_by_name(change, named):
    """The setting, and how to do without the cache."""
    with pytest.raises(omni.OmniPrefixCacheUnmatchError, match=named) as caught:
        gate(**change)
    assert "enable_prefix_caching=False" in str(caught.value)


def batch(**table):
    class Tables(list):
        block_tables = property(list)

    blocks = torch.tensor([[7, 3], [1, 2]])
    entry = SimpleNamespace(block_table=SimpleNamespace(cpu=blocks), **table)
    return SimpleNamespace(
        req_ids=["a", "b"],
        req_id_to_index={"a": 0, "b": 1},
        num_computed_tokens_cpu=[3, 0],
        block_table=Tables([entry]),
    )


def test_the_view_of_a_batch():
    """Order and slots of the runner's own table; positions beyond it are left out."""
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
    view = omni.get_prefix_cache_group_view(batch(), 4, groups)
    assert view.batch_req_ids() == ["a", "b"]
    assert view.step_slots_cpu(["b", "a"], {"a": 3, "b": 1}).tolist() == [4, 31, 12, 13]
    assert view.step_slots_cpu(["a"], {"a": 9}).tolist() == [31, 12, 13, 14, 15]
    bare = SimpleNamespace(block_table=SimpleNamespace())
    assert omni.get_prefix_cache_group_view(bare, 4, groups) is None


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"dcp_world_size": 2}, "decode_context_parallel_size"),
        ({"kv_cache_block_size": 8}, "hit_unit_tokens"),
    ],
)
def test_a_view_that_cannot_be_translated_is_refused(table, named):
    """Striped tokens, and blocks of another size; whole kernel blocks are served."""
    with pytest.raises(omni.OmniPrefixCacheUnmatchError, match=named):
        omni.FullAttentionGroupView(batch(**table), 4)
    omni.FullAttentionGroupView(batch(blocks_per_kv_block=2), 4)


def test_policies_of_models():
    """From the model's attributes; keys in the order of delivery."""
    model = SimpleNamespace(deferred_prefix_cache_mm_keys={"codes"})
    policy = omni.ModelCachePolicy.from_model(model)
    assert policy.get_hit_keys(["z", "a", HIDDEN_KEY]) == [HIDDEN_KEY, "a", "z"]
    assert [policy.skip_immediate_mm(key) for key in ("codes", "a", HIDDEN_KEY)] == [1, 0, 1]
    opted_out = omni.ModelCachePolicy(needs_full_hidden_states=False)
    assert (opted_out.hidden_key, opted_out.get_hit_keys(["a"])) == (None, ["a"])


@pytest.fixture
def theirs(monkeypatch):
    """A package shaped as vLLM-Omni's, and a runner module that has imported from it."""
    originals = {name: type(name, (), {}) for name in REPLACEMENTS}
    modules = ["", ".core", ".core.prefix_cache"]
    modules += [f".core.prefix_cache.{name}" for name in switch._MODULES]
    modules.append(".worker")
    for name in modules:
        module = ModuleType(f"vllm_omni{name}")
        module.__path__ = []
        if "prefix_cache" in name or name == ".worker":
            vars(module).update(originals)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield originals
    vllm_omni.uninstall()


def test_installing_replaces_every_name_everywhere(theirs):
    """Where they are defined and where they were imported; and back, exactly."""
    vllm_omni.install()
    vllm_omni.install()
    runner = sys.modules["vllm_omni.worker"]
    package = sys.modules["vllm_omni.core.prefix_cache"]
    for name in REPLACEMENTS:
        assert getattr(runner, name) is getattr(package, name) is getattr(omni, name)
    vllm_omni.uninstall()
    assert {name: getattr(runner, name) for name in REPLACEMENTS} == theirs


@pytest.mark.parametrize(("value", "installed"), [("1", True), ("0", False), ("", False)])
def test_the_entry_point_waits_to_be_asked(theirs, monkeypatch, value, installed):
    """Being installed beside vLLM changes nothing by itself."""
    monkeypatch.setenv("SLOTMIRROR_VLLM_OMNI", value)
    vllm_omni.install_if_asked()
    replaced = sys.modules["vllm_omni.worker"].OmniPrefixCacheManager
    assert (replaced is omni.OmniPrefixCacheManager) == installed
