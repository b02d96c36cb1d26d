"""Compares what a consumer got with what the dictionaries say."""

from __future__ import annotations

import numpy as np
import torch

from slotmirror.conformance.traces.outputs import leftover_values, page_stamps
from slotmirror.conformance.traces.plain_model import KeyRows, PlainModel, Span, WrongDelivery
from slotmirror.conformance.traces.rows import SPECS, RowTable, bytes_of
from slotmirror.conformance.traces.trace import TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.merge import StageOutputs


class DeliveryCheck:
    """One call's outputs against the model; raises `WrongDelivery`."""

    def __init__(self, model: PlainModel, table: RowTable, step: TraceStep) -> None:
        self._model = model
        self._table = table
        self._step = step

    def check(self, step_id: int, names: tuple[str, ...], out: StageOutputs) -> None:
        """Every span, row and leftover of every request that was asked for."""
        if tuple(out.spans) != names:
            raise WrongDelivery(f"step {step_id}: got {list(out.spans)}, asked for {list(names)}")
        for name in names:
            self._check_request(step_id, name, out)
        if self._step.leftover:
            self._check_leftovers(step_id, names, out)

    def _check_request(self, step_id: int, name: str, out: StageOutputs) -> None:
        got = {
            key: rows[name] for key, rows in out.mm_outputs.items() if key in SPECS and name in rows
        }
        if out.hidden_states is not None:
            got[HIDDEN_KEY] = out.hidden_states[name]
        span = out.spans[name]
        keys = self._expected_keys(step_id, name, span, set(got))
        for key, rows in keys.items():
            reported = out.key_spans[key][name] if key in out.key_spans else span
            self._check_rows(f"step {step_id} {name} {key}", key, rows, got[key], reported)

    def _expected_keys(
        self, step_id: int, name: str, span: Span, got: set[str]
    ) -> dict[str, KeyRows]:
        expected = self._model.expected(step_id, name)
        for allowed, keys in expected:
            if allowed == span and keys.keys() == got:
                return keys
        choices = [(allowed, sorted(keys)) for allowed, keys in expected]
        raise WrongDelivery(
            f"step {step_id} {name}: span {span} of {sorted(got)}, expected {choices}"
        )

    def _check_rows(self, where: str, key: str, rows: KeyRows, got: object, reported: Span) -> None:
        if not isinstance(got, torch.Tensor) or reported != rows.span:
            raise WrongDelivery(f"{where}: span {reported}, expected {rows.span}")
        spec = SPECS[key]
        if got.shape != (len(rows.stamps), *spec.trailing_shape) or got.dtype != spec.dtype:
            raise WrongDelivery(f"{where}: {got.dtype} {tuple(got.shape)}, expected {rows.span}")
        if not rows.stamps:
            return
        expected = self._table.rows(key, rows.stamps)
        found = bytes_of(got)
        if not np.array_equal(found, expected):
            wrong = np.flatnonzero((found != expected).any(axis=1))
            raise WrongDelivery(
                f"{where}: rows {wrong.tolist()} of span {rows.span} differ: "
                f"{found[wrong[0]].tobytes().hex()}, expected stamp {rows.stamps[wrong[0]]}"
            )
        self._model.counts["rows"] += len(rows.stamps)

    def _check_leftovers(self, step_id: int, names: tuple[str, ...], out: StageOutputs) -> None:
        stamps = page_stamps(self._step)
        firsts = {part.req_id: part.stamps for part in self._step.parts}
        lengths = {part.req_id: len(part.slots) for part in self._step.parts}
        for key, value in leftover_values(stamps).items():
            for name in names:
                expected = value
                if isinstance(value, torch.Tensor) and len(value) == len(stamps):
                    first = int(np.flatnonzero(stamps == firsts[name])[0])
                    expected = value[first : first + lengths[name]]
                if not _same(out.mm_outputs[key][name], expected):
                    raise WrongDelivery(f"step {step_id} {name}: leftover {key!r} differs")


def _same(found: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    return found == expected
