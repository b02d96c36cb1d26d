"""One request as the KV cache and the scheduler see it (seed 2; spec kv 1.4, 2, 6).

A request is owned by the engine thread; nothing here locks.
"""

import hashlib
import sys
from collections.abc import Sequence, Sized
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from slotmirror.kvcache.hash_functions import BlockHash
from slotmirror.kvcache.request_params import (
    FinishReason,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    RequestStatus,
    SamplingParams,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "BlockHasher",
    "FinishReason",
    "LoRARequest",
    "MultimodalFeature",
    "PoolingParams",
    "Request",
    "RequestStatus",
    "SamplingParams",
]

_NEVER = sys.maxsize


class BlockHasher(Protocol):
    """From a request to the hashes of its full blocks beyond those in its `block_hashes`."""

    @property
    def hash_block_size(self) -> int: ...

    def __call__(self, request: "Request") -> list[BlockHash]: ...


class Request:
    """A prompt, what was generated for it so far, and how far it is computed.

    `all_token_ids` is prompt plus output; change it only through the methods here, which keep
    `block_hashes` in step: one hash for every full block of `hash_block_size` tokens, made at
    construction for the prompt and whenever appended tokens complete a block. Without a
    `block_hasher` the list stays empty.

    A `resumable` request is a session: it pauses where another one ends, and goes on.

    `is_prefill_chunk` says that the latest scheduled tokens leave known ones uncomputed, so that
    nothing is sampled after them; `num_cached_tokens` are the hits of the first admission.

    With `prompt_embeds` (rows, hidden) and no ids, every prompt position has token id 0; with
    both (mixed mode), `prompt_is_token_ids` says which positions are real ids.

    Raises ValueError for an empty prompt, for features that are unsorted, overlap or leave the
    prompt, and for an embeds tensor or mask whose length is not the prompt's.
    """

    __slots__ = (
        "_block_hasher",
        "_embeds_digests",
        "_next_hash_at",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "has_prompt_ids",
        "is_prefill_chunk",
        "lora_request",
        "mm_features",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "pooling_params",
        "priority",
        "prompt_embeds",
        "prompt_is_token_ids",
        "request_id",
        "resumable",
        "sampling_params",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        pooling_params: PoolingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        mm_features: Sequence[MultimodalFeature] = (),
        prompt_embeds: "torch.Tensor | None" = None,
        prompt_is_token_ids: Sequence[bool] | None = None,
        resumable: bool = False,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.resumable = resumable
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids
        parts = (prompt_token_ids, prompt_embeds, prompt_is_token_ids)
        self.num_prompt_tokens = _prompt_length(request_id, parts)
        self.has_prompt_ids = prompt_token_ids is not None
        self.all_token_ids = (
            _plain_ints(prompt_token_ids)
            if prompt_token_ids is not None
            else [0] * self.num_prompt_tokens
        )
        self.sampling_params = None if pooling_params else sampling_params or SamplingParams()
        self.pooling_params = pooling_params
        self.arrival_time = arrival_time
        self.priority = priority
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.mm_features = list(mm_features)
        check_features(request_id, self.mm_features, self.num_prompt_tokens)
        self.skip_reading_prefix_cache = self._skips_reading()

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.is_prefill_chunk = False
        self.num_preemptions = 0
        self.spec_token_ids: list[int] = []
        self.block_hashes: list[BlockHash] = []
        self._embeds_digests: dict[tuple[int, int], bytes] = {}
        self._block_hasher: BlockHasher | None = None
        self._next_hash_at = _NEVER
        if block_hasher is not None:
            self.attach_block_hasher(block_hasher)

    def __lt__(self, other: "Request") -> bool:
        """Priority order: smaller priority first, then earlier arrival, then the id."""
        return self._rank() < other._rank()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """A copy of the prompt's ids, None if it consists of embeddings alone."""
        return self.all_token_ids[: self.num_prompt_tokens] if self.has_prompt_ids else None

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def max_tokens(self) -> int:
        return self.sampling_params.max_tokens if self.sampling_params is not None else 1

    @property
    def has_block_hasher(self) -> bool:
        return self._block_hasher is not None

    def attach_block_hasher(self, block_hasher: BlockHasher) -> None:
        """Hash the full blocks known so far, and those that later tokens complete."""
        self._block_hasher = block_hasher
        self._hash_full_blocks(block_hasher)

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append generated tokens and hash the blocks they complete."""
        if isinstance(token_ids, int):
            self.all_token_ids.append(token_ids)
        else:
            self.all_token_ids.extend(token_ids)
        if len(self.all_token_ids) >= self._next_hash_at and self._block_hasher is not None:
            self._hash_full_blocks(self._block_hasher)

    def continue_session(
        self,
        token_ids: Sequence[int],
        mm_features: Sequence[MultimodalFeature] = (),
    ) -> None:
        """Make everything computed the prompt and extend it by the session's next tokens.

        A last sampled token that was never computed is dropped, and with it the hash of a block
        that it completed (public issues 49377, 49449: the stale hash made later tokens hit
        blocks with other contents). Accepted drafts after the token that ended the turn are
        computed but not known: they do not count. Offsets of `mm_features` count from the first
        new token. Raises ValueError, changing nothing, for bad features and for a prompt of
        embeddings alone.
        """
        if not self.has_prompt_ids:
            raise ValueError(
                f"request {self.request_id!r}: a session cannot go on after a prompt of embeddings"
            )
        base = min(self.num_computed_tokens, self.num_tokens)
        moved = [
            MultimodalFeature(f.identifier, f.offset + base, f.length, f.payload)
            for f in mm_features
        ]
        features = self.mm_features + moved
        check_features(self.request_id, features, base + len(token_ids))

        self.num_computed_tokens = base
        del self.all_token_ids[base:]
        self.all_token_ids.extend(token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.mm_features = features
        if self._block_hasher is not None:
            del self.block_hashes[base // self._block_hasher.hash_block_size :]
            self._hash_full_blocks(self._block_hasher)

    def prompt_embeds_digest(self, start: int, end: int) -> bytes:
        """SHA-256 of the raw bytes of embedding rows [start, end), computed once per range."""
        digest = self._embeds_digests.get((start, end))
        if digest is None:
            import torch

            assert self.prompt_embeds is not None
            rows = self.prompt_embeds[start:end].detach().cpu().contiguous().flatten()
            digest = hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).digest()
            self._embeds_digests[start, end] = digest
        return digest

    def _hash_full_blocks(self, block_hasher: BlockHasher) -> None:
        self.block_hashes += block_hasher(self)
        self._next_hash_at = (len(self.block_hashes) + 1) * block_hasher.hash_block_size

    def _rank(self) -> tuple[int, float, str]:
        return self.priority, self.arrival_time or 0.0, self.request_id

    def _skips_reading(self) -> bool:
        params = self.pooling_params or self.sampling_params
        return params is not None and params.skips_reading


def _plain_ints(token_ids: Sequence[int]) -> list[int]:
    """Plain Python ints: pickle writes those of an array library differently, so that equal
    prompts would hash differently."""
    if isinstance(token_ids, list | tuple):
        return list(token_ids)
    return [int(token) for token in token_ids]


def _prompt_length(request_id: str, parts: Sequence[Sized | None]) -> int:
    lengths = {len(part) for part in parts if part is not None}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"request {request_id!r} needs a prompt: prompt_token_ids, prompt_embeds or both, "
            f"of one non-zero length; got lengths {sorted(lengths)}"
        )
    return lengths.pop()


def check_features(request_id: str, features: Sequence[MultimodalFeature], num_tokens: int) -> None:
    """Raise ValueError unless features are sorted, disjoint and inside the prompt."""
    for before, after in pairwise(features):
        if after.offset < before.end:
            raise ValueError(
                f"request {request_id!r}: multimodal features must be sorted by offset and not "
                f"overlap, but {after.identifier!r} starts at {after.offset} before "
                f"{before.identifier!r} ends at {before.end}"
            )
    if features and features[-1].end > num_tokens:
        raise ValueError(
            f"request {request_id!r}: multimodal feature {features[-1].identifier!r} ends at "
            f"{features[-1].end}, after the prompt's {num_tokens} tokens"
        )
