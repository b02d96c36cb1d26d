"""Parts of the tiny transformer: rotary positions, grouped-query attention over paged KV, SwiGLU.

Only torch operations that every device has; float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's own documentation uses
from torch import nn

from slotmirror.engine.models.base import Int64Array, StepBatch
from slotmirror.engine.paged_kv import PagedKV, context_slots

NORM_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests of one step that attend together, each with q tokens over c context positions.

    rows: (b, q) batch rows; slots: (b, c) context slots; mask: (b, 1, q, c), true where the token
    may look. Slots behind a request's last position are padding and masked.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all layers of one step share: slots, rotary tables and attention groups."""

    slots: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    groups: tuple[AttentionGroup, ...]


def plan_step(batch: StepBatch, block_size: int, rope: "Rope") -> StepPlan:
    """Decodes attend as one padded group, every other request by itself."""
    device = rope.frequencies.device
    counts = np.diff(batch.offsets)
    decodes = np.flatnonzero(counts == 1)
    members: list[Int64Array] = [decodes] if len(decodes) else []
    members.extend(np.array([request]) for request in np.flatnonzero(counts > 1))
    cosines, sines = rope.tables(torch.from_numpy(batch.positions).to(device))
    return StepPlan(
        slots=torch.from_numpy(batch.slots).to(device),
        cosines=cosines,
        sines=sines,
        groups=tuple(_plan_group(batch, block_size, requests, device) for requests in members),
    )


def _plan_group(
    batch: StepBatch, block_size: int, requests: Int64Array, device: torch.device
) -> AttentionGroup:
    starts = batch.offsets[requests]
    num_queries = int(batch.offsets[requests[0] + 1] - starts[0])
    rows = starts[:, None] + np.arange(num_queries)
    positions = batch.positions[rows]
    num_positions = int(positions.max()) + 1
    slots = context_slots(batch.block_tables[requests], num_positions, block_size)
    mask = np.arange(num_positions) <= positions[:, None, :, None]
    return AttentionGroup(
        rows=torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(slots).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


class Rope:
    """Rotary position embedding for one head width, base 10,000."""

    def __init__(self, head_width: int, device: torch.device) -> None:
        exponents = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
        self.frequencies = (10_000.0**-exponents).to(device)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cosines and sines (n, 1, head_width / 2) for int64 `positions` (n,)."""
        angles = positions[:, None, None] * self.frequencies
        return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """`heads` (n, h, w) turned by their positions; pairs are (i, i + w / 2)."""
    low, high = heads.chunk(2, dim=-1)
    turned = (
        low * plan.cosines - high * plan.sines,
        high * plan.cosines + low * plan.sines,
    )
    return torch.cat(turned, dim=-1)


class PagedAttention(nn.Module):
    """Grouped-query attention whose keys and values live in paged rows of this layer."""

    def __init__(
        self, width: int, num_heads: int, num_kv_heads: int, keys_kv: PagedKV, values_kv: PagedKV
    ) -> None:
        super().__init__()
        self._head_width = width // num_heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, num_kv_heads * self._head_width, bias=False)
        self.values = nn.Linear(width, num_kv_heads * self._head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self._keys_kv = keys_kv
        self._values_kv = values_kv

    def forward(self, inputs: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        heads = (len(inputs), -1, self._head_width)
        queries = rotate(self.queries(inputs).view(heads), plan)
        self._keys_kv.write(plan.slots, rotate(self.keys(inputs).view(heads), plan))
        self._values_kv.write(plan.slots, self.values(inputs).view(heads))
        attended = torch.empty_like(queries)
        for group in plan.groups:
            attended[group.rows] = F.scaled_dot_product_attention(
                queries[group.rows].transpose(1, 2),
                self._keys_kv.read(group.slots).transpose(1, 2),
                self._values_kv.read(group.slots).transpose(1, 2),
                attn_mask=group.mask,
                enable_gqa=True,
            ).transpose(1, 2)
        projected: torch.Tensor = self.output(attended.view(len(inputs), -1))
        return projected


class SwiGlu(nn.Module):
    """Feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner_width, bias=False)
        self.up = nn.Linear(width, inner_width, bias=False)
        self.down = nn.Linear(inner_width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        return outputs


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, both added to the residual stream."""

    def __init__(self, attention: PagedAttention, feed_forward: SwiGlu, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.attention_norm = nn.RMSNorm(width, eps=NORM_EPSILON)
        self.feed_forward_norm = nn.RMSNorm(width, eps=NORM_EPSILON)

    def forward(self, stream: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        stream = stream + self.attention(self.attention_norm(stream), plan)
        outputs: torch.Tensor = stream + self.feed_forward(self.feed_forward_norm(stream))
        return outputs
