"""D: what is delivered, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch

from slotmirror.core.errors import (
    HitSpanError,
    KeyLayoutError,
    MissingRowsError,
    RowLayoutError,
    UsageError,
)
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows

NO_HIDDEN = ModelCachePolicy(needs_full_hidden_states=False)


def saved(driver: Driver, req_id: str, start: int, count: int, blocks: tuple[int, ...]) -> None:
    """One request computes `count` rows from position 0 and is delivered."""
    driver.run({req_id: (0, count)}, rows(start, count), new={req_id: (0, blocks)})


def test_D1_a_miss_returns_this_steps_unpadded_rows_in_batch_order() -> None:
    """Rows of the padding are never delivered; each request gets its own rows."""
    driver = Driver()
    driver.start({"a": (0, 3), "b": (0, 2)}, new={"a": (0, (0,)), "b": (0, (1,))})
    step_id = driver.save(rows(0, 8), num_tokens_unpadded=5, num_tokens_padded=8)
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert list(out.hidden_states) == ["a", "b"]
    assert firsts(out.hidden_states["a"]) == [0, 1, 2]
    assert firsts(out.hidden_states["b"]) == [3, 4]
    assert dict(out.spans) == {"a": (0, 3), "b": (0, 2)}


def test_D1_a_request_that_is_named_twice_is_delivered_once() -> None:
    """In the order of the first mention."""
    driver = Driver()
    driver.start({"a": (0, 1), "b": (0, 2)}, new={"a": (0, (0,)), "b": (0, (1,))})
    out = driver.cache.materialize(driver.save(rows(0, 3)), ["b", "a", "b"])
    assert out.hidden_states is not None
    assert {name: firsts(tensor) for name, tensor in out.hidden_states.items()} == {
        "b": [1, 2],
        "a": [0],
    }
    assert list(out.spans) == ["b", "a"]
    assert len(out.spans) == 2


def test_D1_requests_may_come_from_an_iterator() -> None:
    """It is read once: every request that it names is delivered."""
    driver = Driver()
    driver.start({"a": (0, 1), "b": (0, 2)}, new={"a": (0, (0,)), "b": (0, (1,))})
    names = iter(("b", "a"))
    out = driver.cache.materialize(driver.save(rows(0, 3)), names)  # type: ignore[arg-type]
    assert list(out.spans) == ["b", "a"]


def test_D1_outputs_can_be_pickled() -> None:
    """They arrive in another process as plain dictionaries of the same rows."""
    driver = Driver()
    driver.start({"a": (0, 1), "b": (0, 2)}, new={"a": (0, (0,)), "b": (0, (1,))})
    out = driver.cache.materialize(driver.save(rows(0, 3)))
    copied = pickle.loads(pickle.dumps(out))
    assert out.hidden_states is not None
    assert type(copied.hidden_states) is dict
    assert list(copied.hidden_states) == ["a", "b"]
    assert all(map(torch.equal, copied.hidden_states.values(), out.hidden_states.values()))
    assert copied.spans == dict(out.spans)


def test_D1_rows_follow_the_runners_order() -> None:
    """`req_ids` at the save says in which order the rows lie, whatever the batch order was."""
    driver = Driver()
    driver.start({"a": (0, 3), "b": (0, 2)}, new={"a": (0, (0,)), "b": (0, (1,))})
    out = driver.cache.materialize(driver.save(rows(0, 5), req_ids=["b", "a"]))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1]
    assert firsts(out.hidden_states["a"]) == [2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_D2_a_hit_is_one_contiguous_tensor_of_pool_rows_then_this_steps(dtype: torch.dtype) -> None:
    """Byte-identical to the rows that were saved, for every dtype; one contiguous tensor."""
    driver = Driver()
    first, tail = rows(1, 8, 3).to(dtype), rows(20, 2, 3).to(dtype)
    driver.run({"a": (0, 8)}, first, new={"a": (0, (0, 1))})
    out = driver.run({"b": (8, 2)}, tail, new={"b": (8, (0, 1, 2))})
    assert out.hidden_states is not None
    merged = out.hidden_states["b"]
    assert merged.is_contiguous()
    assert merged.dtype == dtype
    expected = torch.cat([first.view(torch.uint8), tail.view(torch.uint8)])
    assert torch.equal(merged.view(torch.uint8), expected)
    assert out.spans["b"] == (0, 10)


def test_D2_hits_and_misses_share_a_step_in_any_row_order() -> None:
    """Two hits between two misses, rows in another order than the batch: each gets its own."""
    driver = Driver(num_blocks=16)
    saved(driver, "old", 0, 8, (0, 1))
    driver.start(
        {"m1": (0, 1), "h1": (4, 2), "m2": (0, 3), "h2": (8, 1)},
        new={"m1": (0, (2,)), "h1": (4, (0, 3)), "m2": (0, (4,)), "h2": (8, (0, 1, 5))},
    )
    step_id = driver.save(rows(100, 7), req_ids=["h2", "m2", "h1", "m1"])
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["h2"]) == [0, 1, 2, 3, 4, 5, 6, 7, 100]
    assert firsts(out.hidden_states["m2"]) == [101, 102, 103]
    assert firsts(out.hidden_states["h1"]) == [0, 1, 2, 3, 104, 105]
    assert firsts(out.hidden_states["m1"]) == [106]


@pytest.mark.parametrize("fate", ["live", "finished", "aborted"])
def test_D3_requests_that_share_a_prefix_and_diverge(fate: str) -> None:
    """Shared rows come from shared blocks, tails are each request's own, whatever became of A."""
    driver = Driver()
    driver.start({"a": (0, 8)}, new={"a": (0, (0, 1))})
    step_id = driver.save(rows(0, 8))
    if fate == "aborted":
        driver.cache.discard_step(step_id)
    else:
        driver.cache.materialize(step_id)
    ended = [] if fate == "live" else ["a"]
    scheduled = {"b": (4, 4)} | ({"a": (8, 1)} if fate == "live" else {})
    blocks = {"appended": {"a": (3,)}} if fate == "live" else {}
    out = driver.run(
        scheduled, rows(50, len(scheduled) + 3), new={"b": (4, (0, 2))}, ended=ended, **blocks
    )
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 50, 51, 52, 53]
    if fate == "live":
        assert firsts(out.hidden_states["a"]) == [54]
    later = driver.run({"c": (4, 1)}, rows(90, 1), new={"c": (4, (0, 4))})
    assert later.hidden_states is not None
    assert firsts(later.hidden_states["c"]) == [0, 1, 2, 3, 90]


@pytest.mark.parametrize(
    ("computed", "blocks", "message"),
    [
        (3, (0,), r"request 'b', hit of 3 tokens: not a whole number of blocks of 4 tokens"),
        (4, (), r"request 'b', hit of 4 tokens: needs 1 blocks, its table has 0"),
        (8, (0,), r"request 'b', hit of 8 tokens: needs 2 blocks, its table has 1"),
        (4, (9, 1), r"request 'b', hit of 4 tokens: block ids \[9\] outside 0\.\.7"),
    ],
)
def test_D4_impossible_hits_raise_and_change_nothing(
    computed: int, blocks: tuple[int, ...], message: str
) -> None:
    """Unaligned hits and hits without their blocks are refused; the cache goes on as before."""
    driver = Driver()
    saved(driver, "a", 0, 8, (0, 1))
    driver.settle()
    before = driver.cache.stats()
    with pytest.raises(HitSpanError, match=message):
        driver.start({"b": (computed, 1)}, new={"b": (computed, blocks)})
    assert driver.cache.stats() == before
    out = driver.run({"c": (4, 1)}, rows(9, 1), new={"c": (4, (0, 2))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [0, 1, 2, 3, 9]


def test_D5_absent_hidden_rows_raise_and_the_others_keep_theirs() -> None:
    """The error names the request and its slots; the step is then materialized without it."""
    driver = Driver()
    saved(driver, "a", 0, 4, (0,))
    driver.start({"bad": (4, 1), "good": (4, 1)}, new={"bad": (4, (6, 1)), "good": (4, (0, 2))})
    step_id = driver.save(rows(10, 2))
    with pytest.raises(MissingRowsError, match=r"'bad': slots \[24, 25, 26, 27\]") as caught:
        driver.cache.materialize(step_id)
    assert caught.value.req_ids == ("bad",)
    out = driver.cache.materialize(step_id, ["good"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["good"]) == [0, 1, 2, 3, 11]
    assert list(out.hidden_states) == ["good"]


def test_D6_a_hit_delivers_a_key_that_its_own_step_omits() -> None:
    """Then the hit rows alone, with their span; other requests of the step lack the key."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), {"codes": rows(50, 4)}, new={"a": (0, (0,))})
    out = driver.run(
        {"b": (4, 2), "c": (0, 1)},
        rows(10, 3),
        {},
        new={"b": (4, (0, 1)), "c": (0, (2,))},
    )
    assert firsts(out.mm_outputs["codes"]["b"]) == [50, 51, 52, 53]
    assert out.key_spans["codes"]["b"] == (0, 4)
    assert out.spans["b"] == (0, 6)
    assert "c" not in out.mm_outputs["codes"]
    assert list(out.mm_outputs["codes"]) == ["b"]
    assert len(out.mm_outputs["codes"]) == 1


def test_D6_absent_rows_of_a_key_read_zeros() -> None:
    """A hit span of which only a part has rows of a key: the rest is zeros."""
    driver = Driver(policy=NO_HIDDEN)
    driver.run({"a": (0, 4)}, None, {"codes": rows(50, 4)}, new={"a": (0, (0, 1))})
    driver.run({"a": (4, 4)}, None, {"other": rows(1, 4)})
    out = driver.run({"b": (8, 1)}, None, {"codes": rows(99, 1)}, new={"b": (8, (0, 1, 2))})
    assert firsts(out.mm_outputs["codes"]["b"]) == [50, 51, 52, 53, 0, 0, 0, 0, 99]
    assert firsts(out.mm_outputs["other"]["b"]) == [0, 0, 0, 0, 1, 2, 3, 4]


def test_D6_a_key_first_seen_in_the_hits_own_step_is_zeros_then_its_rows() -> None:
    """The key has no row in the span; this step's rows stand at their positions."""
    driver = Driver()
    saved(driver, "a", 0, 4, (0,))
    out = driver.run({"b": (4, 2)}, rows(9, 2), {"late": rows(7, 2)}, new={"b": (4, (0, 1))})
    assert firsts(out.mm_outputs["late"]["b"]) == [0, 0, 0, 0, 7, 8]


def test_D6_a_recycled_slot_whose_new_owner_omits_a_key_reads_zeros() -> None:
    """Never the former owner's row (the reference implementation leaks it; historical bug 11)."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), {"secret": rows(70, 4)}, new={"a": (0, (0,))})
    driver.run({"b": (0, 4)}, rows(10, 4), {}, new={"b": (0, (0,))}, ended=["a"])
    out = driver.run({"c": (4, 1)}, rows(20, 1), {"secret": rows(90, 1)}, new={"c": (4, (0, 1))})
    assert firsts(out.mm_outputs["secret"]["c"]) == [0, 0, 0, 0, 90]
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [10, 11, 12, 13, 20]


def test_D7_padded_and_unpadded_tensors_of_any_rank_are_per_token() -> None:
    """Hidden padded, one key not, one key of rank 3: all cached with their trailing shapes."""
    driver = Driver()
    cube = torch.arange(4 * 2 * 3, dtype=torch.int64).view(4, 2, 3)
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.cache.materialize(
        driver.save(
            rows(0, 8),
            {"cube": cube, "padded": rows(30, 8)},
            num_tokens_unpadded=4,
            num_tokens_padded=8,
        )
    )
    driver.start({"b": (4, 1)}, new={"b": (4, (0, 1))})
    out = driver.cache.materialize(
        driver.save(rows(9, 8), {}, num_tokens_unpadded=1, num_tokens_padded=8)
    )
    assert torch.equal(out.mm_outputs["cube"]["b"], cube)
    assert firsts(out.mm_outputs["padded"]["b"]) == [30, 31, 32, 33]


def test_D7_everything_else_is_a_leftover_of_this_step_alone() -> None:
    """Never cut, nested shapes kept, never cached; a tensor of n rows is sliced, others shared."""
    policy = ModelCachePolicy(leftover_keys=frozenset({"named"}))
    driver = Driver(policy=policy)
    long = torch.arange(9)
    nested = {"list": [torch.ones(2), "text"], "pair": (torch.tensor(3), None)}
    mm = {
        "one_dim": torch.arange(3),
        "long": long,
        "nested": nested,
        "named": rows(40, 3),
        "number": 7,
        "empty_rows": torch.empty(3, 0),
    }
    out = driver.run(
        {"a": (0, 2), "b": (0, 1)}, rows(0, 3), mm, new={"a": (0, (0,)), "b": (0, (1,))}
    )
    assert out.mm_outputs["one_dim"]["a"].tolist() == [0, 1]
    assert out.mm_outputs["one_dim"]["b"].tolist() == [2]
    assert firsts(out.mm_outputs["named"]["b"]) == [42]
    assert torch.equal(out.mm_outputs["long"]["b"], long)
    received = out.mm_outputs["nested"]["a"]
    assert received["list"][0].tolist() == [1, 1]
    assert received["list"][1] == "text"
    assert received["pair"][0].item() == 3
    assert received["pair"][1] is None
    assert out.mm_outputs["number"]["b"] == 7
    assert out.mm_outputs["empty_rows"]["a"].shape == (2, 0)
    later = driver.run({"c": (0, 1)}, rows(0, 1), {}, new={"c": (0, (2,))})
    assert later.mm_outputs == {}


@pytest.mark.parametrize(
    ("tensor", "found"),
    [(rows(0, 1, 3), r"\(3\) float32"), (rows(0, 1).to(torch.int64), r"\(2\) int64"),
     (rows(0, 1)[:, None], r"\(1, 2\) float32")],
)  # fmt: skip
def test_D8_a_key_that_changes_raises_and_the_save_may_be_repeated(
    tensor: torch.Tensor, found: str
) -> None:
    """Both layouts are named; without the offending key the same step is then saved (C3)."""
    driver = Driver()
    driver.run({"a": (0, 4)}, rows(0, 4), {"codes": rows(5, 4)}, new={"a": (0, (0,))})
    driver.start({"a": (4, 1)}, appended={"a": (1,)})
    with pytest.raises(KeyLayoutError, match=rf"codes: {found}.*opened with codes: \(2\) float32"):
        driver.save(rows(4, 1), {"codes": tensor})
    out = driver.cache.materialize(driver.save(rows(4, 1), {}))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [4]
    again = driver.run({"b": (4, 1)}, rows(9, 1), {"codes": rows(8, 1)}, new={"b": (4, (0, 2))})
    assert firsts(again.mm_outputs["codes"]["b"]) == [5, 6, 7, 8, 8]


def test_D9_outputs_may_be_overwritten_by_the_next_forward() -> None:
    """Step 1 materialized after step 2's forward still holds step 1: rows, keys and leftovers."""
    driver = Driver(policy=NO_HIDDEN)
    codes, leftover, hidden = rows(0, 2), torch.arange(5), rows(9, 2)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    step_id = driver.save(hidden, {"codes": codes, "ref": [leftover]})
    for buffer in (codes, leftover, hidden):
        buffer.fill_(-1)
    driver.start({"a": (2, 2)})
    driver.save(hidden, {"codes": codes, "ref": [leftover]})
    out = driver.cache.materialize(step_id)
    assert out.hidden_states is None
    assert firsts(out.mm_outputs["codes"]["a"]) == [0, 1]
    assert out.mm_outputs["ref"]["a"][0].tolist() == [0, 1, 2, 3, 4]


def test_D9_outputs_outlive_their_page() -> None:
    """Tensors of a step stay as they are when its page serves later steps."""
    driver = Driver(staging_depth=1)
    first = driver.run({"a": (0, 2)}, rows(0, 2), {"x": torch.arange(3)}, new={"a": (0, (0,))})
    for start in range(2, 4):
        driver.run({"a": (start, 1)}, rows(start * 10, 1), {"x": torch.arange(3) + 9})
    assert first.hidden_states is not None
    assert firsts(first.hidden_states["a"]) == [0, 1]
    assert first.mm_outputs["x"]["a"].tolist() == [0, 1, 2]


def test_hidden_that_does_not_fit_is_refused() -> None:
    """Missing hidden states, or ones with a wrong number of rows, are named; nothing changes."""
    driver = Driver()
    driver.start({"a": (0, 3)}, new={"a": (0, (0,))})
    with pytest.raises(RowLayoutError, match="set needs_full_hidden_states=False to opt out"):
        driver.save(None, {}, num_tokens_unpadded=3)
    with pytest.raises(RowLayoutError, match=r"hidden has shape \(4, 2\); expected \(3, …\)"):
        driver.save(rows(0, 4), num_tokens_unpadded=3, num_tokens_padded=8)
    with pytest.raises(UsageError, match="reserved key '__hidden_states__'"):
        driver.save(rows(0, 3), {"__hidden_states__": rows(0, 3)})
    out = driver.cache.materialize(driver.save(rows(0, 3)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1, 2]
