"""The decoder stack that both transformer stages share: embeddings, layers over paged KV, norm."""

from dataclasses import dataclass

import torch
from torch import nn

from slotmirror.engine.models import layers
from slotmirror.engine.models.base import TAPPED_LAYER, StepBatch
from slotmirror.engine.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of the decoder."""

    num_layers: int = 3
    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    inner_width: int = 176


class DecoderStack(nn.Module):
    """`shape.num_layers` decoder layers, each with its own paged keys and values."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        head_width = shape.width // shape.num_heads
        kv_row = (shape.num_kv_heads, head_width)

        def layer() -> layers.DecoderLayer:
            keys, values = (
                PagedKV(num_blocks, block_size, kv_row, torch.float32, device) for _ in range(2)
            )
            attention = layers.PagedAttention(
                shape.width, shape.num_heads, shape.num_kv_heads, keys, values
            )
            feed_forward = layers.SwiGlu(shape.width, shape.inner_width)
            return layers.DecoderLayer(attention, feed_forward, shape.width)

        self.embedding = nn.Embedding(vocab_size, shape.width)
        self.layers = nn.ModuleList(layer() for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=layers.NORM_EPSILON)
        self._rope = layers.Rope(head_width, device)
        self._block_size = block_size
        self._device = device

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """(n, width): token embeddings, replaced by encoder outputs at multimodal positions."""
        inputs: torch.Tensor = self.embedding(torch.from_numpy(batch.token_ids).to(self._device))
        if batch.embeddings is not None:
            rows = torch.from_numpy(batch.embedded_rows).to(self._device)
            inputs.index_copy_(0, rows, batch.embeddings)
        return inputs

    def forward(self, inputs: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden states and the tapped layer's output, both (n, width)."""
        plan = layers.plan_step(batch, self._block_size, self._rope)
        stream = inputs
        tapped = inputs
        for index, layer in enumerate(self.layers):
            stream = layer(stream, plan)
            if index == TAPPED_LAYER:
                tapped = stream
        return self.norm(stream), tapped


def seed_weights(module: nn.Module, seed: int) -> None:
    """Give every parameter of `module` seeded values on its device and freeze it.

    Matrices are normal with variance 1 / inputs, so that a stack keeps its scale; embeddings have
    variance 1, norms are 1. Drawn on the host: the same weights on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        scale = 1.0 if id(parameter) in embeddings else parameter.shape[1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
