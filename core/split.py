"""Which output goes where: rows that are kept, rows that are dropped, leftovers (D7, D8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch

from slotmirror.core.errors import KeyLayoutError, RowLayoutError, UsageError
from slotmirror.core.key_spec import HIDDEN_KEY, KeySpec
from slotmirror.core.policy import ModelCachePolicy


def split_outputs(
    hidden: torch.Tensor | None,
    mm_outputs: Mapping[str, object],
    counts: tuple[int, int],
    policy: ModelCachePolicy,
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """A step's outputs by key: rows, and leftovers; reads no tensor's bytes.

    `counts` are the step's unpadded and padded tokens. Rows are tensors of exactly the step's rows,
    copied to the page and kept. Leftovers are delivered with this step only, never cut, never
    cached.
    A tensor of at least two dimensions whose first is the unpadded or the padded token count is
    per-token, unless the policy names it a leftover (D7). Raises `RowLayoutError` for hidden
    states that the policy needs and the step lacks, or of a wrong number of rows.
    """
    rows: dict[str, torch.Tensor] = {}
    leftovers: dict[str, object] = {}
    if policy.needs_full_hidden_states:
        rows[HIDDEN_KEY] = _hidden_rows(hidden, counts)
    for name, output in mm_outputs.items():
        if name == HIDDEN_KEY:
            raise UsageError(f"mm_outputs has the reserved key {HIDDEN_KEY!r}: rename it")
        if name not in policy.leftover_keys and is_per_token(output, counts):
            rows[name] = _unpadded(output, counts[0])
        else:
            leftovers[name] = output
    return rows, leftovers


def is_per_token(output: object, counts: tuple[int, int]) -> TypeGuard[torch.Tensor]:
    """Whether an output has one row, with bytes in it, for each token of the step."""
    if not isinstance(output, torch.Tensor):
        return False
    shape = output.shape
    return len(shape) >= 2 and shape[0] in counts and 0 not in shape


def check_layout(spec: KeySpec, opened: KeySpec) -> None:
    """Raise `KeyLayoutError` if a key's rows differ from those it was opened with (D8)."""
    if spec != opened:
        mend = "" if spec.name == HIDDEN_KEY else "name it in leftover_keys, or "
        raise KeyLayoutError(
            f"key {spec.name!r} has rows {spec} in this step, it was opened with {opened}: one key "
            f"keeps one row layout; {mend}save the step without it"
        )
    if spec.row_bytes == 0:
        raise KeyLayoutError(f"key {spec} has rows without bytes: there is nothing to keep")


def _hidden_rows(hidden: torch.Tensor | None, counts: tuple[int, int]) -> torch.Tensor:
    if hidden is None:
        mend = "set needs_full_hidden_states=False to opt out"
        raise RowLayoutError(f"hidden is None, but the policy keeps hidden states: {mend}")
    if not is_per_token(hidden, counts):
        wanted = f"({counts[0]}, …) or the padded ({counts[1]}, …), with elements in every row"
        raise RowLayoutError(f"hidden has shape {tuple(hidden.shape)}; expected {wanted}")
    return _unpadded(hidden, counts[0])


def _unpadded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows if rows.shape[0] == count else rows[:count]
