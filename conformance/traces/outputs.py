"""What a step computes, as stamps and as leftovers; the same on every device."""

from __future__ import annotations

import numpy as np
import torch

from slotmirror.conformance.traces.rows import LEFTOVER_KEY, Stamps
from slotmirror.conformance.traces.trace import Part, TraceStep


def page_stamps(step: TraceStep) -> Stamps:
    """The stamp of each row of the step's tensors, without padding."""
    parts = {part.req_id: part for part in step.parts}
    return np.concatenate([_stamps(parts[name]) for name in step.order])


def _stamps(part: Part) -> Stamps:
    return np.arange(part.stamps, part.stamps + len(part.slots), dtype=np.int64)


def leftover_values(stamps: Stamps) -> dict[str, object]:
    """The leftovers of a step with these rows: one row per token, or of another shape (D7)."""
    values = torch.from_numpy(np.stack((stamps, -stamps), axis=1))
    if stamps.min() % 2:
        return {LEFTOVER_KEY: values, "flat": torch.from_numpy(stamps.copy())}
    return {"long": values.repeat(5, 1)[: 2 * len(values) + 3], "odd": ["text", len(stamps)]}
