"""What every row of a pipeline's output must be: by formula, or from a reference run."""

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch

from slotmirror.engine.errors import RequestError
from slotmirror.engine.models import fingerprint, transformer
from slotmirror.engine.models import fingerprint_formula as formula
from slotmirror.engine.models.base import (
    CODES_KEY,
    HIDDEN_KEY,
    NUM_CODES,
    TAPPED_KEY,
    Int64Array,
    UInt64Array,
)
from slotmirror.engine.pipeline_types import TALKER, THINKER, PipelineOutput, PipelineRequest

ExpectedRows: TypeAlias = dict[str, dict[str, torch.Tensor]]
"""Stage → key → the rows of positions 0, 1, … that the stage must deliver."""


class Oracle(Protocol):
    """Says what both stages must have delivered for a request."""

    def rows(self, output: PipelineOutput) -> ExpectedRows:
        """Every per-token key, delivered exactly once per position of the request."""

    def leftovers(self, expected: ExpectedRows) -> ExpectedRows:
        """Every leftover key; a step delivers the row of its last position."""


class FingerprintOracle:
    """The formula: needs the request and the decoded tokens, no cache and no engine."""

    def rows(self, output: PipelineOutput) -> ExpectedRows:
        request = output.request
        thinker_tokens = (*request.token_ids, *output.thinker.output_token_ids[:-1])
        talker_tokens = (*request.token_ids, *output.talker.output_token_ids[:-1])
        images = _image_contents(request, len(thinker_tokens))
        hidden = _rows(request, THINKER, thinker_tokens, images, HIDDEN_KEY, formula.HIDDEN_WIDTH)
        tapped = _rows(request, THINKER, thinker_tokens, images, TAPPED_KEY, formula.HIDDEN_WIDTH)
        upstream = np.zeros((len(talker_tokens), formula.HIDDEN_WIDTH), dtype=np.int64)
        upstream[: len(request.token_ids)] = hidden[: len(request.token_ids)]
        contents = formula.row_digests(upstream)
        codes = _rows(request, TALKER, talker_tokens, contents, CODES_KEY, NUM_CODES)
        return {
            THINKER: {
                HIDDEN_KEY: torch.from_numpy(hidden),
                TAPPED_KEY: torch.from_numpy(tapped),
            },
            TALKER: {CODES_KEY: torch.from_numpy(codes)},
        }

    def leftovers(self, expected: ExpectedRows) -> ExpectedRows:
        return {
            stage: {fingerprint.LEFTOVER_KEY: _leftover_rows(next(iter(rows.values())).numpy())}
            for stage, rows in expected.items()
        }


class ReferenceOracle:
    """The rows of a caching-off run of the same requests (and the same decoded tokens)."""

    def __init__(self, reference: Mapping[str, PipelineOutput]) -> None:
        self._reference = reference

    def rows(self, output: PipelineOutput) -> ExpectedRows:
        found = self._reference.get(output.req_id)
        if found is None:
            raise RequestError(f"the reference run has no request {output.req_id!r}")
        return {THINKER: dict(found.thinker.rows), TALKER: dict(found.talker.rows)}

    def leftovers(self, expected: ExpectedRows) -> ExpectedRows:
        return {THINKER: {transformer.LEFTOVER_KEY: expected[THINKER][HIDDEN_KEY]}, TALKER: {}}


def _rows(
    request: PipelineRequest,
    stage: str,
    token_ids: tuple[int, ...],
    contents: UInt64Array,
    key: str,
    width: int,
) -> Int64Array:
    seed = formula.prefix_seed(stage, request.stage_salt(stage))
    return formula.expected_rows(token_ids, seed, contents, key, width)


def _leftover_rows(rows: Int64Array) -> torch.Tensor:
    """The leftover row of every position, from the states in any other output's `rows`."""
    states = rows.view(np.uint64)[:, 1]
    leftovers = formula.state_rows(
        rows[:, 0], states, fingerprint.LEFTOVER_KEY, formula.HIDDEN_WIDTH
    )
    return torch.from_numpy(leftovers)


def _image_contents(request: PipelineRequest, num_positions: int) -> UInt64Array:
    contents = np.zeros(num_positions, dtype=np.uint64)
    for feature in request.mm_features:
        rows = formula.encoder_rows(feature.identifier, feature.length)
        contents[feature.offset : feature.end] = formula.row_digests(rows)
    return contents
