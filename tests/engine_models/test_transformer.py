"""The tiny transformer: the same rows, within rounding, however a prefix was computed."""

import numpy as np
import pytest
import torch

from slotmirror.engine.models.base import CODES_KEY, HIDDEN_KEY, VOCAB_SIZE
from slotmirror.engine.models.decoder import DecoderShape
from slotmirror.engine.models.transformer import (
    LEFTOVER_KEY,
    NUM_LEVELS,
    TalkerTransformer,
    ThinkerTransformer,
)
from support.step_batches import Part, compute, compute_chunked

BLOCK = 8
LAYER = "hidden_states.layer_1"
CPU = torch.device("cpu")
TOLERANCE = 1e-5


def thinker(seed: int = 1) -> ThinkerTransformer:
    return ThinkerTransformer(
        DecoderShape(), num_blocks=40, block_size=BLOCK, seed=seed, device=CPU
    )


def talker() -> TalkerTransformer:
    return TalkerTransformer(
        DecoderShape(), upstream_width=64, num_blocks=40, block_size=BLOCK, seed=2, device=CPU
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference of a row over the row's largest value."""
    return float(((got - want).abs().amax(1) / want.abs().amax(1)).max())


@pytest.mark.parametrize("chunk", [1, 7, 8, 33])
def test_chunks_agree_with_one_step(chunk: int) -> None:
    """Chunked prefill over a shuffled table gives the rows of one step within 1e-5 relative."""
    tokens = prompt(45)
    whole, _ = compute(thinker(), [Part(tokens, range(1, 7), 0, 45)], BLOCK)
    rows = compute_chunked(thinker(), Part(tokens, [9, 3, 30, 2, 17, 5], 0, 45), chunk, BLOCK)
    for name in (HIDDEN_KEY, LAYER):
        assert relative_error(rows[name], whole[name]) < TOLERANCE


def test_hit_agrees_with_a_full_prefill() -> None:
    """A tail computed over another request's blocks equals the tail of a full prefill."""
    tokens, model = prompt(61), thinker()
    compute(model, [Part(prompt(40)[:40] + prompt(8, 1), range(1, 7), 0, 48)], BLOCK)
    full, _ = compute(thinker(), [Part(prompt(40) + tokens[40:], range(1, 9), 0, 61)], BLOCK)
    hit = Part(prompt(40) + tokens[40:], [1, 2, 3, 4, 5, 20, 21, 22], 40, 61)
    rows, _ = compute(model, [hit], BLOCK)
    assert relative_error(rows[HIDDEN_KEY], full[HIDDEN_KEY][40:]) < TOLERANCE


@pytest.mark.parametrize("wrong", range(5))
def test_one_wrong_block_is_seen(wrong: int) -> None:
    """Any block of a hit replaced by another one moves rows a thousand tolerances or more."""
    tokens, model = prompt(45), thinker()
    rows, _ = compute(model, [Part(tokens, range(1, 7), 0, 45)], BLOCK)
    compute(model, [Part(prompt(8, 5), [11], 0, 8)], BLOCK)
    table = [1, 2, 3, 4, 5, 12]
    table[wrong] = 11
    tail, _ = compute(model, [Part(tokens, table, 40, 45)], BLOCK)
    assert relative_error(tail[HIDDEN_KEY], rows[HIDDEN_KEY][40:]) > 1000 * TOLERANCE


def test_mixed_batch_agrees_with_single_requests() -> None:
    """Decodes of different lengths, padded to one group, and a prefill beside them keep their rows.

    The third request hits the two blocks that the second fills in the same step (H1).
    """
    tokens = [prompt(20, 1), prompt(33, 2), [*prompt(33, 2)[:16], *prompt(6, 3)], prompt(41, 4)]
    tables = [[1, 2, 3], [4, 5, 6, 7, 8], [4, 5, 9], [10, 11, 12, 13, 14, 15]]
    model = thinker()
    compute(model, [Part(tokens[0], tables[0], 0, 19), Part(tokens[3], tables[3], 0, 40)], BLOCK)
    firsts = [19, 0, 16, 40]
    parts = [Part(t, table, f, len(t)) for t, table, f in zip(tokens, tables, firsts, strict=True)]
    rows, result = compute(model, parts, BLOCK)
    start = 0
    leftover = result.leftovers[LEFTOVER_KEY]
    assert isinstance(leftover, list)
    for index, (sequence, first) in enumerate(zip(tokens, firsts, strict=True)):
        alone, want = compute(thinker(), [Part(sequence, range(1, 8), 0, len(sequence))], BLOCK)
        got = rows[HIDDEN_KEY][start : start + len(sequence) - first]
        assert relative_error(got, alone[HIDDEN_KEY][first:]) < TOLERANCE
        assert relative_error(leftover[index], alone[HIDDEN_KEY][-1:]) < TOLERANCE
        assert result.next_tokens[index] == want.next_tokens[0]
        start += len(sequence) - first


def test_why_not_bitwise() -> None:
    """Float sums depend on their order, and a matmul's order depends on the batch's shape.

    One projection of a real hidden row is summed left to right and by halves, as kernels with
    different blocking do: both are within rounding of the exact sum, but their bits differ. A hit
    computes a tail of other shape than the full prefill, so equality to the bit is not promised.
    """
    rows, _ = compute(thinker(), [Part(prompt(16), [1, 2], 0, 16)], BLOCK)
    row = rows[HIDDEN_KEY][-1].numpy()
    weights = np.random.default_rng(0).standard_normal((32, len(row))).astype(np.float32)
    products = weights * row
    in_order = np.add.accumulate(products, axis=1, dtype=np.float32)[:, -1]
    by_halves = products
    while by_halves.shape[1] > 1:
        middle = by_halves.shape[1] // 2
        by_halves = by_halves[:, :middle] + by_halves[:, middle:]
    exact = products.astype(np.float64).sum(axis=1)
    bound = TOLERANCE * np.abs(exact).max()
    assert np.abs(in_order - exact).max() < bound
    assert np.abs(by_halves[:, 0] - exact).max() < bound
    assert (in_order != by_halves[:, 0]).any()


def test_weights_follow_the_seed() -> None:
    """Equal seeds give equal rows, another seed other rows."""
    part = Part(prompt(9), [1, 2], 0, 9)
    first, again, other = (compute(thinker(seed), [part], BLOCK)[0] for seed in (3, 3, 4))
    assert torch.equal(first[HIDDEN_KEY], again[HIDDEN_KEY])
    assert relative_error(first[HIDDEN_KEY], other[HIDDEN_KEY]) > 0.1


def test_image_embeddings_replace_the_placeholders() -> None:
    """Two images at the same placeholder tokens give different rows from the image onward."""

    class Image:
        length = 6

        def __init__(self, identifier: str) -> None:
            self.identifier = identifier

    tokens, model = [65, 66, *[300] * 6, 67], thinker()
    rows = [
        compute(
            model, [Part(tokens, [1, 2], 0, 9, embeddings=(2, model.encode(Image(name))))], BLOCK
        )[0][HIDDEN_KEY]
        for name in ("a", "a", "b")
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0][:2], rows[2][:2])
    assert relative_error(rows[0][2:], rows[2][2:]) > 0.1


def test_talker_codes_follow_prefix_and_upstream() -> None:
    """Codes of a hit agree within one level; other upstream rows give other codes."""
    tokens = prompt(30)
    upstream = torch.randn((30, 64), generator=torch.Generator().manual_seed(0))
    model = talker()
    whole, result = compute(model, [Part(tokens, [1, 2, 3, 4], 0, 30, upstream=upstream)], BLOCK)
    hit, _ = compute(model, [Part(tokens, [1, 2, 3, 9], 24, 30, upstream=upstream)], BLOCK)
    other, _ = compute(model, [Part(tokens, [5, 6, 7, 8], 0, 30, upstream=-upstream)], BLOCK)
    codes = whole[CODES_KEY]
    assert codes.dtype == torch.int64
    assert int(codes.min()) >= 0
    assert int(codes.max()) < NUM_LEVELS
    assert int((hit[CODES_KEY] - codes[24:]).abs().max()) <= 1
    assert int((other[CODES_KEY] - codes).abs().max()) > NUM_LEVELS // 4
    assert result.next_tokens[0] == VOCAB_SIZE + codes[-1, 0]


def test_talker_refuses_to_encode() -> None:
    """Multimodal items belong to the thinker; the talker says so."""

    class Image:
        identifier = "cat"
        length = 6

    with pytest.raises(TypeError, match="'cat'"):
        talker().encode(Image())
