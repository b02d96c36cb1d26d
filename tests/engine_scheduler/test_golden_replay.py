"""Every handed vector of the real vLLM is replayed; differences are found and named."""

import copy
import json
import re
from pathlib import Path

import pytest

from slotmirror.engine.golden_replay import VectorFileError, replay, replay_file, replay_report
from slotmirror.kvcache.event_stream.wire import decode_batch

GOLDEN = Path(__file__).parent.parent / "golden" / "vllm_kv_prefix_cache.json"


@pytest.fixture(scope="module")
def data():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report():
    return replay_report(GOLDEN)


def test_no_difference(report):
    """All hash vectors of both versions, all manager and scheduler traces: 0 differences.

    Statistics are compared with lookups counted by the replay, as 0.25.1 did (X5).
    """
    assert [str(difference) for difference in report.differences] == []
    assert (report.num_hash_vectors, report.num_manager_ops) == (232, 1140)
    assert report.num_scheduler_steps == 300
    assert report.num_values > 13_000


def test_the_exceptions_are_those_of_x6(report):
    """Only the same-object vector of each pickle algorithm, in the tagged format."""
    assert [(e.where, e.field, e.exception) for e in report.exceptions] == [
        ("tagged/sha256/mm_same_image_twice_same_object", "block_hashes", "X6"),
        ("tagged/xxhash/mm_same_image_twice_same_object", "block_hashes", "X6"),
    ]


def test_distinct_objects_are_canonical(data):
    """X6: without its exception, the same-object vectors have our hash of the distinct ones."""
    tagged = data["hash_vectors_v0_32_0"]
    by_name = {(v["algo"], v["name"]): v["block_hashes"] for v in tagged["hash_vectors"]}
    exceptions = replay({"hash_vectors_v0_32_0": tagged}).exceptions
    for exception in exceptions:
        _, algo, name = exception.where.split("/")
        canonical = name.replace("same_object", "distinct_objects")
        assert exception.actual == by_name[algo, canonical]


def plant(data, kind, change):
    planted = copy.deepcopy(data)
    change(planted[kind])
    return [(d.where, d.field) for d in replay(planted).differences]


def test_planted_differences_are_found(data):
    """One wrong value in each kind of vector: the report names where and which field."""

    def wrong_hash(vectors):
        vectors[0]["block_hashes"][0] = "00" * 32

    def wrong_free_order(traces):
        traces[0]["ops"][0]["free"].reverse()

    def wrong_table(traces):
        traces[0]["steps"][0]["new"][0]["block_ids"] = [[1, 2, 3, 4, 6]]

    assert plant(data, "hash_vectors", wrong_hash) == [
        ("v0_25/sha256/plain_13_bs4", "block_hashes")
    ]
    assert plant(data, "manager_traces", wrong_free_order) == [("manager/full_a[0] add r0", "free")]
    assert plant(data, "scheduler_traces", wrong_table) == [("scheduler/s_fcfs_small[0]", "new")]


MISC = {
    "group_key": "key",
    "int64_event_hash": "int",
    "kv_event_batch_msgpack": "msgpack_hex",
}


@pytest.mark.parametrize(("name", "field"), MISC.items())
def test_planted_differences_in_byte_forms_are_found(data, name, field):
    """The group key, the event's integer and the bytes of an event batch are compared too."""
    planted = copy.deepcopy(data["misc"])
    planted[name][field] = 1 if field == "int" else planted[name][field][:-2] + "99"
    differences = replay({"misc": planted}).differences
    assert [(d.where, d.field) for d in differences] == [(f"misc/{name}", field)]


def scenario_bytes(text):
    """The batch that a scenario emits, decoded."""
    report = replay({"misc": {"kv_event_batch_msgpack": {"scenario": text, "msgpack_hex": ""}}})
    (difference,) = report.differences
    return decode_batch(bytes.fromhex(difference.actual))


def test_other_event_scenarios_are_understood():
    """Another size and algorithm, raw hashes, no adapter, several evictions."""
    batch = scenario_bytes(
        "block_size 2, tokens 5..9, salt 'x y', sha256_cbor seed '7'; "
        "allocate 5 tokens, evict_blocks({1, 2}), free; batch ts=0.25, data_parallel_rank=3, "
        "raw hashes"
    )
    assert (batch.ts, batch.data_parallel_rank) == (0.25, 3)
    stored, *removed = batch.events
    assert [len(block_hash) for block_hash in stored.block_hashes] == [32, 32]
    assert stored.token_ids == [5, 6, 7, 8]
    assert stored.extra_keys == [("x y",), None]
    assert [event.block_hashes[0] for event in removed] == stored.block_hashes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tokens 0..8", "tokens 0-8", "block_size 4, tokens 0-8, lora"),
        ("free", "melt", "KV-event operation 'melt' is not understood"),
        ("sha256", "md5", "hash algorithm 'md5' is not one of sha256"),
    ],
)
def test_event_scenarios_that_are_not_understood_are_refused(data, old, new, message):
    """The error shows the part."""
    vector = data["misc"]["kv_event_batch_msgpack"]
    changed = vector | {"scenario": vector["scenario"].replace(old, new)}
    with pytest.raises(VectorFileError, match=re.escape(message)):
        replay({"misc": {"kv_event_batch_msgpack": changed}})


def test_traces_do_not_depend_on_the_environment(monkeypatch, data):
    """Traces have their own seed, whatever PYTHONHASHSEED says."""
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert replay({"manager_traces": data["manager_traces"][:1]}).differences == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "top level is no object"),
        ("{}", "it holds no vectors"),
        ('{"hash_vectors": {}}', "hash_vectors must be a list of objects"),
        ('{"misc": 3}', "misc must be an object, not int"),
        ('{"manager_traces": [{"name": "a"}]}', "field 'config' is missing in an object with name"),
        ('{"none_hash": {"md5": {}}}', "hash algorithm 'md5' is not one of sha256, sha256_cbor"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, text, message):
    """The error names the file and what is wrong with it."""
    path = tmp_path / "vectors.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(VectorFileError, match=f"vectors.json.*{message}"):
        replay_file(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens_rule", "i for i in range(9)", "tokens_rule 'i for i in range"),
        ("prompt_embeds", "torch.ones(3)", "prompt_embeds 'torch.ones"),
    ],
)
def test_unknown_rules_are_refused(data, key, value, message):
    """A rule that is not understood is named, not guessed."""
    vector = data["hash_vectors"][0] | {key: value, "tokens": None}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        replay({"hash_vectors": [vector]})


def test_unknown_group_types_are_refused(data):
    """A kind of attention that traces of this format do not have is named."""
    trace = copy.deepcopy(data["manager_traces"][0])
    trace["config"]["groups"][0]["type"] = "mamba"
    with pytest.raises(ValueError, match="group type 'mamba' is not one of full, swa"):
        replay({"manager_traces": [trace]})


def test_unknown_operations_are_refused(data):
    """An operation that traces of this format do not have is named."""
    trace = copy.deepcopy(data["manager_traces"][0])
    trace["ops"][0]["op"] = "melt"
    with pytest.raises(VectorFileError, match="operation 'melt' is not one of add, resume"):
        replay({"manager_traces": [trace]})
