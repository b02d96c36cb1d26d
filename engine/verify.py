"""Verification of pipeline outputs, row by row.

The fingerprint model is checked against its formula, byte for byte, for both stages; the
transformer against a caching-off run of the same requests, within a tolerance. A row counts as
verified when its position, its owner and its content are right; every position that the request
makes a stage compute must have been delivered exactly once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.engine.errors import RequestError
from slotmirror.engine.oracle import FingerprintOracle, Oracle, ReferenceOracle
from slotmirror.engine.pipeline_types import (
    STAGES,
    PipelineConfig,
    PipelineOutput,
)
from slotmirror.engine.stage_output import StageOutput

RELATIVE_TOLERANCE = 1e-5
"""Of a row's largest value. Not bitwise: a hit runs matrix products of other shapes, which sum in
another order (the transformer's tests show it)."""

CODE_LEVELS_TOLERANCE = 1
"""A rounding difference moves a quantised code by one level at most."""

FIRST_MISMATCHES_MAX = 10

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One row that is missing, was delivered more than once, or is wrong."""

    req_id: str
    stage: str
    key: str
    position: int
    reason: str
    got: str
    expected: str

    def __str__(self) -> str:
        return (
            f"request {self.req_id!r}, {self.stage} {self.key!r}, position {self.position}: "
            f"{self.reason}; got {self.got}, expected {self.expected}"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Requests looked at, rows found right (leftovers apart), rows found wrong."""

    requests: int
    rows_verified: int
    leftovers_verified: int
    mismatches: int
    first_mismatches: tuple[Mismatch, ...]

    @property
    def ok(self) -> bool:
        """Something was looked at, and all of it was right."""
        return self.rows_verified > 0 and self.mismatches == 0


class Verifier:
    """Checks outputs one by one, so that a long run need not keep them.

    `reference`: the outputs of the caching-off run; needed by the transformer, refused for the
    fingerprint model, whose formula needs none. Raises `RequestError` otherwise.
    """

    def __init__(
        self, config: PipelineConfig, reference: Mapping[str, PipelineOutput] | None = None
    ) -> None:
        self._exact = config.model == "fingerprint"
        self._oracle: Oracle
        if self._exact:
            self._oracle = FingerprintOracle()
        elif reference is None:
            raise RequestError(
                "verifying the transformer needs the outputs of a caching-off run: "
                "run Pipeline(config.caching_off()) on the same requests"
            )
        else:
            self._oracle = ReferenceOracle(reference)
        self._requests = 0
        self._rows_verified = 0
        self._leftovers_verified = 0
        self._mismatches = 0
        self._first: list[Mismatch] = []

    def add(self, output: PipelineOutput) -> None:
        """Check all rows and leftovers of both stages of one request."""
        expected = self._oracle.rows(output)
        leftovers = self._oracle.leftovers(expected)
        self._requests += 1
        for stage in STAGES:
            delivered = output.stage(stage)
            for key in sorted({*expected[stage], *delivered.rows}):
                self._check_rows(output, stage, key, expected[stage].get(key))
            self._check_leftovers(stage, delivered, leftovers[stage])

    def report(self) -> VerifyReport:
        """What was found so far."""
        return VerifyReport(
            requests=self._requests,
            rows_verified=self._rows_verified,
            leftovers_verified=self._leftovers_verified,
            mismatches=self._mismatches,
            first_mismatches=tuple(self._first),
        )

    def _check_rows(
        self, output: PipelineOutput, stage: str, key: str, expected: torch.Tensor | None
    ) -> None:
        num_rows = output.request.num_rows(stage)
        delivered = output.stage(stage)
        rows, counts = delivered.rows.get(key), delivered.deliveries.get(key)
        if (
            expected is None
            or rows is None
            or counts is None
            or not len(rows) == len(expected) == num_rows
        ):
            got, want = (
                "no such key" if part is None else f"{len(part)} rows" for part in (rows, expected)
            )
            for position in range(num_rows):
                self._note(Mismatch(output.req_id, stage, key, position, "wrong key", got, want))
            return
        wrong = ~self._rows_match(rows, expected)
        for position in np.flatnonzero(wrong | (counts != 1)).tolist():
            reason = "wrong row" if counts[position] == 1 else f"delivered {counts[position]} times"
            self._note(
                Mismatch(
                    output.req_id,
                    stage,
                    key,
                    position,
                    reason,
                    _short(rows[position]),
                    _short(expected[position]),
                )
            )
        self._rows_verified += int((~wrong & (counts == 1)).sum())

    def _check_leftovers(
        self, stage: str, delivered: StageOutput, expected: Mapping[str, torch.Tensor]
    ) -> None:
        for item in delivered.leftovers:
            want = expected[item.key][item.position : item.position + 1]
            if self._rows_match(item.value, want).all():
                self._leftovers_verified += 1
                continue
            self._note(
                Mismatch(
                    delivered.req_id,
                    stage,
                    item.key,
                    item.position,
                    "wrong leftover",
                    _short(item.value),
                    _short(want),
                )
            )

    def _rows_match(self, rows: torch.Tensor, expected: torch.Tensor) -> BoolArray:
        """bool (n,); rows that differ in shape or type match nowhere."""
        if rows.shape != expected.shape or rows.dtype != expected.dtype:
            return np.zeros(len(rows), dtype=np.bool_)
        if self._exact:
            return (rows == expected).flatten(1).all(dim=1).numpy()
        difference = (rows - expected).abs().flatten(1).amax(dim=1)
        if not expected.dtype.is_floating_point:
            return (difference <= CODE_LEVELS_TOLERANCE).numpy()
        bound = RELATIVE_TOLERANCE * expected.abs().flatten(1).amax(dim=1)
        return (difference <= bound).numpy()

    def _note(self, mismatch: Mismatch) -> None:
        self._mismatches += 1
        if len(self._first) < FIRST_MISMATCHES_MAX:
            self._first.append(mismatch)


def verify_outputs(
    config: PipelineConfig,
    outputs: Iterable[PipelineOutput],
    reference: Mapping[str, PipelineOutput] | None = None,
) -> VerifyReport:
    """Check all `outputs`; arguments and errors as for `Verifier`."""
    verifier = Verifier(config, reference)
    for output in outputs:
        verifier.add(output)
    return verifier.report()


def _short(row: torch.Tensor) -> str:
    """The first values of a row, for a report."""
    values = row.flatten()[:4].tolist()
    more = ", …" if row.numel() > len(values) else ""
    return (
        "["
        + ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        + more
        + "]"
    )
