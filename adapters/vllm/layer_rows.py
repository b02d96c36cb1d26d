"""Middle layers by name, `hidden_states.layer_K`, through forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slotmirror.core.errors import ConfigError


def layer_key(layer: int) -> str:
    """The key of decoder layer `layer`, from 0: what its output adds up to, before any norm."""
    return f"hidden_states.layer_{layer}"


class LayerRows:
    """Keeps the outputs of some decoder layers of one forward.

    vLLM's decoder layers return the pair (output, residual), whose sum is what the layer hands on;
    the sum is taken at once, since the next layer's norm works in place on both.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self._recording = False
        self._handles: list[RemovableHandle] = []
        if not layers:
            return
        stack = _decoder_layers(model, layers)
        for layer in layers:
            if layer >= len(stack):
                rule = f"the model has {len(stack)} decoder layers: 0 to {len(stack) - 1}"
                raise ConfigError("layers", layer, rule)
        for layer in layers:
            self._handles.append(stack[layer].register_forward_hook(self._hook(layer_key(layer))))

    def start(self) -> None:
        """A real step's forward follows; those of warm-up and capture are not recorded."""
        self._rows = {}
        self._recording = True

    def stop(self) -> dict[str, torch.Tensor]:
        """The recorded rows, (tokens or padded tokens, D) per key."""
        self._recording = False
        rows, self._rows = self._rows, {}
        return rows

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, key: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._recording:
                self._rows[key] = _handed_on(key, output)

        return keep


def _handed_on(key: str, output: object) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.clone()
    parts = output if isinstance(output, tuple) else ()
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(parts) == len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
        return tensors[0] + tensors[1]
    raise ConfigError(
        "layers", key, "this model's decoder layers return neither a tensor nor (output, residual)"
    )


def _decoder_layers(model: nn.Module, layers: Sequence[int]) -> nn.ModuleList:
    """The longest module list named `layers` or `h`: the decoder's stack."""
    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "h")
    ]
    if not stacks:
        raise ConfigError("layers", tuple(layers), "this model has no list of decoder layers")
    return max(stacks, key=len)
