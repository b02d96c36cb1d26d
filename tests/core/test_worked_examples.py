"""Seed 1's two worked examples, with the seed's own tables."""

from __future__ import annotations

import torch

from support.caches import Driver, firsts

FIRST = [
    *("The", "quick", "brown", "fox"),
    *("was", "tired", "and", "slept"),
    *("beneath", "the", "shady", "tree"),
]
SECOND = [*("The", "quick", "brown", "fox"), *("jumped", "over", "the", "dog")]


def hidden_of(words: list[str]) -> torch.Tensor:
    """A (words, 2) hidden state that spells out its word: its number, and its length."""
    numbers = {word: i for i, word in enumerate([*FIRST, *SECOND[4:]])}
    return torch.tensor([[float(numbers[word]), float(len(word))] for word in words])


def feature_of(words: list[str]) -> torch.Tensor:
    """A (words, 16) `mm_feature`, ten times the word's number everywhere."""
    return hidden_of(words)[:, :1].repeat(1, 16) * 10


def pool_rows(driver: Driver, key: str) -> torch.Tensor:
    """The durable rows of a key, `(slots, width)`."""
    driver.settle()
    opened = driver.cache._keys.by_name.get(key)
    assert opened is not None
    return opened.pool.tensor


def test_worked_example_two_fox_sentences() -> None:
    """8 blocks of 4, hidden 2, mm_feature 16: the seed's slot tables, then the merged output."""
    driver = Driver(num_blocks=8, block_size=4)
    driver.run(
        {"one": (0, 12)},
        hidden_of(FIRST),
        {"mm_feature": feature_of(FIRST)},
        new={"one": (0, (0, 1, 2))},
    )
    hidden_pool = pool_rows(driver, "__hidden_states__")
    assert hidden_pool.shape == (8 * 4, 2)
    assert torch.equal(hidden_pool[:12], hidden_of(FIRST))
    assert not hidden_pool[12:].any()
    feature_pool = pool_rows(driver, "mm_feature")
    assert feature_pool.shape == (8 * 4, 16)
    assert torch.equal(feature_pool[:12], feature_of(FIRST))

    out = driver.run(
        {"two": (4, 4)},
        hidden_of(SECOND)[4:],
        {"mm_feature": feature_of(SECOND)[4:]},
        new={"two": (4, (0, 3))},
        ended=["one"],
    )
    assert out.hidden_states is not None
    assert torch.equal(out.hidden_states["two"], hidden_of(SECOND))
    assert torch.equal(out.mm_outputs["mm_feature"]["two"], feature_of(SECOND))
    assert out.spans["two"] == (0, 8)
    # Blocks 0 to 2 as they were, "jumped over the dog" added as block 3, the rest empty.
    assert torch.equal(pool_rows(driver, "__hidden_states__")[:12], hidden_of(FIRST))
    assert torch.equal(hidden_pool[12:16], hidden_of(SECOND)[4:])
    assert not hidden_pool[16:].any()
    driver.cache.shutdown()


def test_worked_example_multimodal_tail() -> None:
    """An image of 6 tokens ends inside block 2: only block 1 is hit, the rest is this step's."""
    first = torch.arange(7, dtype=torch.float32)[:, None].repeat(1, 2)  # Im0..Im5 foo
    second = torch.arange(100, 104, dtype=torch.float32)[:, None].repeat(1, 2)  # Im4 Im5 bar baz
    driver = Driver(num_blocks=8, block_size=4)
    driver.run({"one": (0, 7)}, first, new={"one": (0, (0, 1))})
    out = driver.run({"two": (4, 4)}, second, new={"two": (4, (0, 2))}, ended=["one"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["two"]) == [0, 1, 2, 3, 100, 101, 102, 103]
    driver.cache.shutdown()
