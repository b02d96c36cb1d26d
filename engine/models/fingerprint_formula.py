"""The fingerprint formula: what every row of the fingerprint model must be, from the prefix alone.

The state after position p is a wrapping 64-bit sum of one well-mixed term per position 0 .. p; a
term depends on the position, the token and the content behind it (an encoder embedding, a hidden
row of the stage before). A row carries its position, that state and the output's name, so that a
row of another position, owner or output differs from the expected one.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from slotmirror.engine.models.base import Int64Array, UInt64Array

HIDDEN_WIDTH = 4
"""Columns of hidden rows, of the middle layer's rows and of encoder embeddings."""

_POSITION_STEP = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_STEP = np.uint64(0xD6E8FEB86659FD93)
_COLUMN_STEP = np.uint64(0xA0761D6478BD642F)
_NEXT_TOKEN_KEY = np.uint64(0xE7037ED1A0B428DB)


def digest64(text: str) -> int:
    """A stable 64-bit number for a name, salt or content hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(values: UInt64Array) -> UInt64Array:
    """The finaliser of SplitMix64 on every element: each input bit reaches each output bit."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def row_digests(rows: Int64Array) -> UInt64Array:
    """uint64 (n,): one number per row of int64 `rows` (n, width); depends on every column."""
    columns = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * _COLUMN_STEP
    digests: UInt64Array = mix64(rows.view(np.uint64) + columns).sum(axis=1, dtype=np.uint64)
    return digests


def terms(token_ids: Int64Array, positions: Int64Array, contents: UInt64Array) -> UInt64Array:
    """uint64 (n,): what each position adds to the state; `contents` is 0 for a plain token."""
    tokens = token_ids.astype(np.uint64) * _TOKEN_STEP
    where = (positions.astype(np.uint64) + np.uint64(1)) * _POSITION_STEP
    return mix64(mix64(tokens ^ where) + mix64(contents) + where)


def prefix_states(token_ids: Int64Array, seed: int, contents: UInt64Array) -> UInt64Array:
    """uint64 (n,): the state after each position of one whole sequence of n tokens."""
    positions = np.arange(len(token_ids), dtype=np.int64)
    start = mix64(np.array([seed], dtype=np.uint64))
    sums: UInt64Array = start + np.cumsum(terms(token_ids, positions, contents), dtype=np.uint64)
    return sums


def state_rows(positions: Int64Array, states: UInt64Array, output: str, width: int) -> Int64Array:
    """int64 (n, width), width >= 3: position, state, the output's id, then mixes of all three."""
    output_id = np.uint64(digest64(output))
    rows = np.empty((len(positions), width), dtype=np.uint64)
    rows[:, 0] = positions
    rows[:, 1] = states
    rows[:, 2] = output_id
    columns = np.arange(3, width, dtype=np.uint64) * _COLUMN_STEP
    own = mix64(states ^ output_id) + positions.astype(np.uint64)
    rows[:, 3:] = mix64(own[:, None] + columns)
    return rows.view(np.int64)


def next_tokens(states: UInt64Array, num_tokens: int) -> Int64Array:
    """int64 (n,): the token decoded after each state, in 0 .. num_tokens - 1."""
    return (mix64(states ^ _NEXT_TOKEN_KEY) % np.uint64(num_tokens)).astype(np.int64)


def encoder_rows(identifier: str, length: int) -> Int64Array:
    """int64 (length, HIDDEN_WIDTH): the embeddings of the item with this content hash."""
    states = np.full(length, digest64(identifier), dtype=np.uint64)
    return state_rows(np.arange(length, dtype=np.int64), states, "encoder", HIDDEN_WIDTH)


def expected_rows(
    token_ids: npt.ArrayLike, seed: int, contents: UInt64Array, output: str, width: int
) -> Int64Array:
    """int64 (n, width): the rows of `output` for all n positions of a sequence.

    Depends on the tokens, the prefix seed (stage and salt) and the contents (n,) alone: no KV
    cache, no step, no batch.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    states = prefix_states(tokens, seed, contents)
    return state_rows(np.arange(len(tokens), dtype=np.int64), states, output, width)


def prefix_seed(stage: str, salt: str | None) -> int:
    """What isolates a stage's states from those of another stage or salt."""
    return digest64(f"{stage}/{salt or ''}")
