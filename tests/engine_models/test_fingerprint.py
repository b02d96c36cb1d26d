"""The fingerprint model against its formula, with the KV cache shared, stale and mixed up."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from slotmirror.engine.models import fingerprint_formula as formula
from slotmirror.engine.models.base import HIDDEN_KEY
from slotmirror.engine.models.fingerprint import LEFTOVER_KEY, FingerprintModel
from support.step_batches import Part, batch_of, buffers_of, compute, compute_chunked

BLOCK = 4
LAYER = "hidden_states.layer_1"
MASK = 2**64 - 1


@pytest.fixture
def model() -> FingerprintModel:
    return FingerprintModel(
        num_blocks=16,
        block_size=BLOCK,
        row_widths={LAYER: 4},
        num_next_tokens=256,
        needs_full_hidden=True,
        device=torch.device("cpu"),
    )


def expected(
    token_ids: Sequence[int],
    output: str = HIDDEN_KEY,
    seed: int = 0,
    contents: np.ndarray | None = None,
) -> torch.Tensor:
    if contents is None:
        contents = np.zeros(len(token_ids), dtype=np.uint64)
    return torch.from_numpy(formula.expected_rows(token_ids, seed, contents, output, 4))


def mix(value: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def test_formula_equals_plain_integer_arithmetic() -> None:
    """States of the vectorised formula equal a loop over Python integers, salt and content too."""
    tokens, contents, seed = [5, 5, 250, 0], [0, 7, MASK, 0], 99
    state, states = mix(seed), []
    for position, (token, content) in enumerate(zip(tokens, contents, strict=True)):
        where = (position + 1) * 0x9E3779B97F4A7C15 & MASK
        token_part = mix((token * 0xD6E8FEB86659FD93 & MASK) ^ where)
        state = (state + mix((token_part + mix(content) + where) & MASK)) & MASK
        states.append(state)
    rows = formula.expected_rows(tokens, seed, np.array(contents, dtype=np.uint64), "x", 4)
    assert rows.view(np.uint64)[:, 1].tolist() == states
    assert rows[:, 0].tolist() == [0, 1, 2, 3]
    assert rows.view(np.uint64)[:, 2].tolist() == [formula.digest64("x")] * 4


@pytest.mark.parametrize("chunk", [1, 3, 4, 11])
def test_chunked_prefill_gives_the_formulas_rows(model: FingerprintModel, chunk: int) -> None:
    """Every output's rows follow the formula whatever the step sizes and the table's order."""
    tokens = list(range(40, 51))
    rows = compute_chunked(model, Part(tokens, [9, 2, 5], 0, 11), chunk, BLOCK)
    assert torch.equal(rows[HIDDEN_KEY], expected(tokens))
    assert torch.equal(rows[LAYER], expected(tokens, LAYER))


def test_hit_reads_the_state_another_request_wrote(model: FingerprintModel) -> None:
    """A request that starts behind a shared prefix gives the rows of the whole prefix."""
    shared, tail = [1, 2, 3, 4, 5, 6, 7, 8], [9, 9]
    compute(model, [Part([*shared, 30], [3, 7, 1], 0, 9)], BLOCK)
    rows, _ = compute(model, [Part([*shared, *tail], [3, 7, 2], 8, 10)], BLOCK)
    assert torch.equal(rows[HIDDEN_KEY], expected([*shared, *tail])[8:])


def test_hit_on_blocks_of_the_same_step(model: FingerprintModel) -> None:
    """Requests chained by hits on blocks that this very step fills get fresh states (H1, H2)."""
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    compute(model, [Part([77] * 8, [3, 7], 0, 8)], BLOCK)
    parts = [
        Part(shared[:4], [3], 0, 4),
        Part([*shared[:4], *shared[4:]], [3, 7], 4, 8),
        Part([*shared, 50, 51], [3, 7, 4], 8, 10),
    ]
    rows, _ = compute(model, parts, BLOCK)
    want = torch.cat([expected(shared), expected([*shared, 50, 51])[8:]])
    assert torch.equal(rows[HIDDEN_KEY], want)


@pytest.mark.parametrize("wrong_block", [5, 6])
def test_wrong_block_is_seen(model: FingerprintModel, wrong_block: int) -> None:
    """A hit through a wrong block, empty or another request's, changes every row behind it."""
    shared = [1, 2, 3, 4]
    compute(model, [Part(shared, [3], 0, 4), Part([8, 8, 8, 8], [5], 0, 4)], BLOCK)
    rows, _ = compute(model, [Part([*shared, 9, 9], [wrong_block, 2], 4, 6)], BLOCK)
    want = expected([*shared, 9, 9])[4:]
    assert (rows[HIDDEN_KEY][:, 1] != want[:, 1]).all()


def test_decode_follows_the_sampled_tokens(model: FingerprintModel) -> None:
    """Next tokens and leftovers are functions of the state after the last token."""
    tokens = [1, 2, 3, 4, 5]
    for step in range(6):
        first = 0 if step == 0 else len(tokens) - 1
        _, result = compute(model, [Part(tokens, [1, 2, 3], first, len(tokens))], BLOCK)
        states = formula.prefix_states(np.array(tokens), 0, np.zeros(len(tokens), dtype=np.uint64))
        assert result.next_tokens.tolist() == formula.next_tokens(states[-1:], 256).tolist()
        leftover = result.leftovers[LEFTOVER_KEY]
        assert isinstance(leftover, list)
        assert torch.equal(leftover[0], expected(tokens, LEFTOVER_KEY)[-1:])
        tokens.append(int(result.next_tokens[0]))


def test_salt_image_and_upstream_enter_the_rows(model: FingerprintModel) -> None:
    """Another salt, image or upstream row gives other rows, those of the formula."""
    tokens = [300] * 6
    image = torch.from_numpy(formula.encoder_rows("image-a", 6))
    upstream = torch.arange(24).reshape(6, 4)
    digests = formula.row_digests(image.numpy()), formula.row_digests(upstream.numpy())
    cases = [
        (Part(tokens, [1, 2], 0, 6, prefix_seed=5), expected(tokens, seed=5)),
        (Part(tokens, [1, 2], 0, 6, embeddings=(0, image)), expected(tokens, contents=digests[0])),
        (Part(tokens, [1, 2], 0, 6, upstream=upstream), expected(tokens, contents=digests[1])),
    ]
    states = set()
    for part, want in cases:
        rows = compute_chunked(model, part, 4, BLOCK)
        assert torch.equal(rows[HIDDEN_KEY], want)
        states.add(int(want[0, 1]))
    assert len(states | {int(expected(tokens)[0, 1])}) == 4


def test_next_forward_overwrites_the_buffers(model: FingerprintModel) -> None:
    """The model writes into the engine's buffers: a later step replaces an earlier one's rows."""
    buffers = buffers_of(model, 8)
    model.forward(batch_of([Part([1, 2, 3, 4], [1], 0, 4)], BLOCK), buffers)
    kept = buffers[HIDDEN_KEY].clone()
    model.forward(batch_of([Part([9, 9], [2], 0, 2)], BLOCK), buffers)
    assert torch.equal(buffers[HIDDEN_KEY][:2], expected([9, 9]))
    assert torch.equal(buffers[HIDDEN_KEY][2:], kept[2:])
