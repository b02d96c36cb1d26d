"""The verifier sees every kind of wrong row; its inputs here are made by the formula itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slotmirror.engine.errors import RequestError
from slotmirror.engine.models.base import CODES_KEY, HIDDEN_KEY, TAPPED_KEY
from slotmirror.engine.models.fingerprint import LEFTOVER_KEY
from slotmirror.engine.oracle import FingerprintOracle
from slotmirror.engine.pipeline_types import (
    STAGES,
    TALKER,
    THINKER,
    PipelineConfig,
    PipelineOutput,
    PipelineRequest,
)
from slotmirror.engine.stage_output import Leftover, StageOutput
from slotmirror.engine.verify import FIRST_MISMATCHES_MAX, Verifier, verify_outputs
from support.pipeline_workloads import with_rows, with_stage

FINGERPRINT = PipelineConfig(model="fingerprint")
TRANSFORMER = PipelineConfig(model="transformer")
REQUEST = PipelineRequest("r", range(10), max_tokens=3, max_frames=2)
ROWS_IN_ALL = 2 * 12 + 11


def delivered(stage: str, rows: dict[str, torch.Tensor]) -> StageOutput:
    decoded = REQUEST.max_tokens if stage == THINKER else REQUEST.max_frames
    return StageOutput(
        req_id="r",
        prompt_token_ids=tuple(REQUEST.token_ids),
        output_token_ids=tuple(range(50, 50 + decoded)),
        rows=rows,
        deliveries={key: np.ones(len(value), dtype=np.int32) for key, value in rows.items()},
        leftovers=(),
    )


@pytest.fixture
def right() -> PipelineOutput:
    """What a correct pipeline delivers for `REQUEST`, with one leftover."""
    empty = PipelineOutput("r", REQUEST, delivered(THINKER, {}), delivered(TALKER, {}))
    oracle = FingerprintOracle()
    rows = oracle.rows(empty)
    output = PipelineOutput("r", REQUEST, *(delivered(stage, rows[stage]) for stage in STAGES))
    leftover = oracle.leftovers(rows)[THINKER][LEFTOVER_KEY][9:10]
    thinker = replace(output.thinker, leftovers=(Leftover(LEFTOVER_KEY, 9, leftover),))
    return with_stage(output, THINKER, thinker)


def test_right_rows_pass(right: PipelineOutput) -> None:
    """All rows of both stages count, and nothing is wrong."""
    report = verify_outputs(FINGERPRINT, [right])
    assert report.ok
    assert (report.requests, report.rows_verified, report.leftovers_verified) == (1, ROWS_IN_ALL, 1)


def test_nothing_verified_is_not_ok() -> None:
    """A run without a single row must not look like a verified one."""
    assert not verify_outputs(FINGERPRINT, []).ok


@pytest.mark.parametrize(
    ("stage", "key"), [(THINKER, HIDDEN_KEY), (THINKER, TAPPED_KEY), (TALKER, CODES_KEY)]
)
@pytest.mark.parametrize("position", [0, 4, 10])
def test_one_flipped_bit_is_reported(
    right: PipelineOutput, stage: str, key: str, position: int
) -> None:
    """One bit of one row: one mismatch that names request, stage, key, position and values."""
    rows = right.stage(stage).rows[key].clone()
    rows[position, -1] ^= 1
    wrong = with_stage(right, stage, with_rows(right.stage(stage), key, rows))
    report = verify_outputs(FINGERPRINT, [wrong])
    assert not report.ok
    assert (report.mismatches, report.rows_verified) == (1, ROWS_IN_ALL - 1)
    [mismatch] = report.first_mismatches
    assert (mismatch.req_id, mismatch.stage, mismatch.key) == ("r", stage, key)
    assert (mismatch.position, mismatch.reason) == (position, "wrong row")
    assert str(mismatch).startswith(f"request 'r', {stage} {key!r}, position {position}: wrong row")


def test_another_positions_row_is_wrong(right: PipelineOutput) -> None:
    """Two swapped rows are two mismatches: position and owner count, not only plausibility."""
    rows = right.thinker.rows[HIDDEN_KEY].clone()
    rows[[2, 3]] = rows[[3, 2]]
    wrong = with_stage(right, THINKER, with_rows(right.thinker, HIDDEN_KEY, rows))
    report = verify_outputs(FINGERPRINT, [wrong])
    assert [m.position for m in report.first_mismatches] == [2, 3]


@pytest.mark.parametrize(("count", "reason"), [(0, "delivered 0 times"), (2, "delivered 2 times")])
def test_missing_and_doubled_rows_are_reported(
    right: PipelineOutput, count: int, reason: str
) -> None:
    """A right row that was delivered twice, or never, is a mismatch all the same."""
    counts = right.talker.deliveries[CODES_KEY].copy()
    counts[5] = count
    talker = replace(right.talker, deliveries={CODES_KEY: counts})
    report = verify_outputs(FINGERPRINT, [with_stage(right, TALKER, talker)])
    assert (report.mismatches, report.rows_verified) == (1, ROWS_IN_ALL - 1)
    assert report.first_mismatches[0].reason == reason


def test_missing_unexpected_and_short_keys_are_reported(right: PipelineOutput) -> None:
    """A key that is absent, unknown, or has too few rows is wrong at every expected position."""
    absent = replace(right.talker, rows={}, deliveries={})
    report = verify_outputs(FINGERPRINT, [with_stage(right, TALKER, absent)])
    assert (report.mismatches, report.first_mismatches[0].got) == (11, "no such key")
    unknown = with_rows(right.talker, "codes.more", right.talker.rows[CODES_KEY])
    report = verify_outputs(FINGERPRINT, [with_stage(right, TALKER, unknown)])
    assert (report.mismatches, report.first_mismatches[0].expected) == (11, "no such key")
    short = with_rows(right.talker, CODES_KEY, right.talker.rows[CODES_KEY][:-1])
    report = verify_outputs(FINGERPRINT, [with_stage(right, TALKER, short)])
    assert (report.mismatches, report.first_mismatches[0].got) == (11, "10 rows")


def test_wrong_leftover_is_reported(right: PipelineOutput) -> None:
    """A leftover of another position is a mismatch of its own."""
    [leftover] = right.thinker.leftovers
    thinker = replace(right.thinker, leftovers=(replace(leftover, position=8),))
    report = verify_outputs(FINGERPRINT, [with_stage(right, THINKER, thinker)])
    assert (report.mismatches, report.rows_verified, report.leftovers_verified) == (
        1,
        ROWS_IN_ALL,
        0,
    )
    assert report.first_mismatches[0].reason == "wrong leftover"


def test_only_the_first_mismatches_are_kept(right: PipelineOutput) -> None:
    """Every mismatch counts; a few are described."""
    wrong = with_rows(right.thinker, HIDDEN_KEY, right.thinker.rows[HIDDEN_KEY] + 1)
    report = verify_outputs(FINGERPRINT, [with_stage(right, THINKER, wrong)])
    assert report.mismatches == 12
    assert len(report.first_mismatches) == FIRST_MISMATCHES_MAX


def floats(output: PipelineOutput) -> PipelineOutput:
    """The same rows as the transformer's kinds: float hidden rows, integer codes."""
    rows = {key: value.float() for key, value in output.thinker.rows.items()}
    return with_stage(output, THINKER, replace(output.thinker, rows=rows, leftovers=()))


@pytest.mark.parametrize(("relative", "ok"), [(5e-6, True), (2e-5, False), (float("nan"), False)])
def test_float_rows_are_compared_within_the_tolerance(
    right: PipelineOutput, relative: float, ok: bool
) -> None:
    """Hidden rows may differ by 1e-5 of their largest value, and not by more."""
    reference = floats(right)
    rows = reference.thinker.rows[HIDDEN_KEY].clone()
    rows[3, 0] += relative * rows[3].abs().max()
    output = with_stage(reference, THINKER, with_rows(reference.thinker, HIDDEN_KEY, rows))
    report = verify_outputs(TRANSFORMER, [output], {"r": reference})
    assert report.ok is ok
    assert report.mismatches == (0 if ok else 1)


@pytest.mark.parametrize(("levels", "ok"), [(1, True), (2, False)])
def test_codes_may_differ_by_one_level(right: PipelineOutput, levels: int, ok: bool) -> None:
    """A rounding difference moves a quantised code by one level; two levels are wrong."""
    reference = floats(right)
    codes = reference.talker.rows[CODES_KEY].clone()
    codes[0, 0] += levels
    output = with_stage(reference, TALKER, with_rows(reference.talker, CODES_KEY, codes))
    assert verify_outputs(TRANSFORMER, [output], {"r": reference}).ok is ok


def test_other_type_matches_nowhere(right: PipelineOutput) -> None:
    """Rows of another dtype than the reference's are wrong even where the values agree."""
    reference = floats(right)
    doubles = with_rows(reference.thinker, HIDDEN_KEY, reference.thinker.rows[HIDDEN_KEY].double())
    output = with_stage(reference, THINKER, doubles)
    assert verify_outputs(TRANSFORMER, [output], {"r": reference}).mismatches == 12


def test_transformer_needs_a_reference_that_has_the_request(right: PipelineOutput) -> None:
    """Without a caching-off run, or with one of other requests, verification refuses."""
    with pytest.raises(RequestError, match="needs the outputs of a caching-off run"):
        Verifier(TRANSFORMER)
    with pytest.raises(RequestError, match="the reference run has no request 'r'"):
        Verifier(TRANSFORMER, {}).add(floats(right))
