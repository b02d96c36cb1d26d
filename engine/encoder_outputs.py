"""Encoder outputs by content hash: an image is encoded once however many prompts show it.

Seed, section "What About Multimodal Inputs?": a prompt whose image crosses the end of a hit needs
the rest of the image's embeddings, and finds them here. Which entries stay is the scheduler's
decision; this side follows it.
"""

from collections.abc import Iterable, Sequence

import torch

from slotmirror.engine.errors import EngineError
from slotmirror.engine.models.base import StageModel
from slotmirror.kvcache.request_params import MultimodalFeature


class EncoderOutputs:
    """Embeddings on the model's device, keyed by the features' identifiers."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._outputs: dict[str, torch.Tensor] = {}
        self.num_calls = 0
        """How often the encoder ran."""

    @property
    def device(self) -> torch.device:
        return self._model.device

    def free(self, identifiers: Iterable[str]) -> None:
        """Drop what the scheduler gave up."""
        for identifier in identifiers:
            self._outputs.pop(identifier, None)

    def encode(self, features: Iterable[MultimodalFeature]) -> None:
        """Run the encoder for those `features` that are not here yet."""
        for feature in features:
            if feature.identifier not in self._outputs:
                self._outputs[feature.identifier] = self._model.encode(feature)
                self.num_calls += 1

    def slices(
        self, features: Sequence[MultimodalFeature], first: int, end: int
    ) -> list[tuple[int, torch.Tensor]]:
        """(position, embeddings) of every part of `features` in positions first .. end - 1."""
        parts = []
        for feature in features:
            start, stop = max(first, feature.offset), min(end, feature.end)
            if start >= stop:
                continue
            embeddings = self._outputs.get(feature.identifier)
            if embeddings is None:
                raise EngineError(
                    f"positions {start} to {stop} need the encoder output of "
                    f"{feature.identifier!r}, which was not scheduled or already dropped"
                )
            if len(embeddings) != feature.length:
                raise EngineError(
                    f"feature {feature.identifier!r} has {len(embeddings)} embeddings for "
                    f"{feature.length} placeholders: equal content must have one length"
                )
            parts.append((start, embeddings[start - feature.offset : stop - feature.offset]))
        return parts
