"""Compares what a consumer got with what the dictionaries say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.conformance.traces.outputs import leftover_values, page_stamps
from slotmirror.conformance.traces.plain_model import KeyRows, PlainModel, Span, WrongDelivery
from slotmirror.conformance.traces.rows import SPECS, Bytes, RowTable, bytes_of
from slotmirror.conformance.traces.trace import TraceStep
from slotmirror.core.key_spec import HIDDEN_KEY
from slotmirror.core.merge import StageOutputs


@dataclass(frozen=True, slots=True)
class _Delivered:
    """Rows that were delivered, and what they must be."""

    where: str
    key: str
    expected: KeyRows
    tensor: torch.Tensor


class DeliveryCheck:
    """One call's outputs against the model; raises `WrongDelivery`.

    `note` looks at everything but the rows' bytes, which `compare` may read much later: what was
    delivered stays as it is for as long as somebody holds it (M3).
    """

    def __init__(self, model: PlainModel, table: RowTable, step: TraceStep) -> None:
        self._model = model
        self._table = table
        self._step = step
        self._delivered: list[_Delivered] = []

    def check(self, step_id: int, names: tuple[str, ...], out: StageOutputs) -> None:
        """Every span, row and leftover of every request that was asked for."""
        self.note(step_id, names, out)
        self.compare()

    def note(self, step_id: int, names: tuple[str, ...], out: StageOutputs) -> None:
        """Spans, layouts and leftovers, when the call has returned; remembers the rows."""
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
            self._note_rows(f"step {step_id} {name} {key}", key, rows, got[key], reported)

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

    def _note_rows(self, where: str, key: str, rows: KeyRows, got: object, reported: Span) -> None:
        if not isinstance(got, torch.Tensor) or reported != rows.span:
            raise WrongDelivery(f"{where}: span {reported}, expected {rows.span}")
        spec = SPECS[key]
        if got.shape != (len(rows.stamps), *spec.trailing_shape) or got.dtype != spec.dtype:
            raise WrongDelivery(f"{where}: {got.dtype} {tuple(got.shape)}, expected {rows.span}")
        if rows.stamps:
            self._delivered.append(_Delivered(where, key, rows, got))

    def compare(self, read: Callable[[torch.Tensor], Bytes] = bytes_of) -> int:
        """The bytes of all noted rows, `read` giving those of a tensor; lets go of the tensors.

        Returns how many rows there were.
        """
        delivered, self._delivered = self._delivered, []
        for one in delivered:
            stamps = one.expected.stamps
            expected = self._table.rows(one.key, stamps)
            found = read(one.tensor).reshape(expected.shape)
            if not np.array_equal(found, expected):
                wrong = np.flatnonzero((found != expected).any(axis=1))
                raise WrongDelivery(
                    f"{one.where}: rows {wrong.tolist()} of span {one.expected.span} differ: "
                    f"{found[wrong[0]].tobytes().hex()}, expected stamp {stamps[wrong[0]]}"
                )
        num_rows = sum(len(one.expected.stamps) for one in delivered)
        self._model.count("rows", num_rows)
        return num_rows

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
