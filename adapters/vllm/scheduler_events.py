"""vLLM's `SchedulerOutput` → `StepEvents`, from the outputs alone (K3).

Objects are read by attribute, never by class: the fields are the same in vLLM 0.25 to 0.32 and for
both model runners. A resume comes in `scheduled_cached_reqs.resumed_req_ids` (V1) or as a new
request of a live id (V2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.core.errors import PrefixCacheUnmatchError
from slotmirror.core.events import AdmittedRequest, StepEvents


class NewRequest(Protocol):
    """Of vLLM's `NewRequestData`, what is read here."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """Of vLLM's `CachedRequestData`, what is read here."""

    req_ids: Sequence[str]
    resumed_req_ids: Iterable[str]
    new_block_ids: Sequence[Sequence[Sequence[int]] | None]
    num_computed_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """Of vLLM's `SchedulerOutput`, what is read here."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]]
    finished_req_ids: Iterable[str]


class SchedulerTranslator:
    """Turns every `SchedulerOutput`, in order, into `StepEvents`. Engine thread only."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._tables = BlockTables(num_blocks=num_blocks, block_size=block_size)

    def translate(
        self, output: SchedulerOutput, verified_positions: Mapping[str, int]
    ) -> StepEvents:
        """The events of one step.

        `verified_positions` is what the step before accepted of its drafts (L7). Raises
        `PrefixCacheUnmatchError` for a step that copies KV blocks, which only the step shows (G4).
        """
        if getattr(output, "kv_cache_block_copies", None):
            raise PrefixCacheUnmatchError(
                "prefix_match_unit",
                "finer than a block",
                "the engine copies KV blocks, whose rows would have to be copied too: set it to "
                "the block size",
            )
        new = output.scheduled_new_reqs
        computed = {request.req_id: request.num_computed_tokens for request in new}
        cached = output.scheduled_cached_reqs
        resumed_ids = frozenset(cached.resumed_req_ids)
        resumed: list[AdmittedRequest] = []
        appended: dict[str, Sequence[int]] = {}
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] = num_computed
            if req_id in resumed_ids:
                resumed.append(AdmittedRequest(req_id, num_computed, _only_group(block_ids)))
            elif block_ids is not None:
                appended[req_id] = _only_group(block_ids)
        return self._tables.step(
            ended=sorted(output.finished_req_ids),
            preempted=sorted(getattr(output, "preempted_req_ids", None) or ()),
            new=[
                AdmittedRequest(r.req_id, r.num_computed_tokens, _only_group(r.block_ids))
                for r in new
            ],
            resumed=resumed,
            appended=appended,
            num_computed_tokens=computed,
            num_scheduled_tokens=output.num_scheduled_tokens,
            drafted=[r for r, tokens in output.scheduled_spec_decode_tokens.items() if tokens],
            verified_positions=verified_positions,
        )


def num_prompt_tokens(request: NewRequest) -> int:
    """Length of a request's prompt, given as token ids or as embeddings."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    embeddings = getattr(request, "prompt_embeds", None)
    return 0 if embeddings is None else len(embeddings)


def accepted_positions(
    events: StepEvents, output: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Up to which position each drafted request's tokens were accepted (L7).

    `sampled` has the tokens that each request got in this step: the accepted drafts and one more.
    """
    if not events.drafted:
        return {}
    index = {req_id: i for i, req_id in enumerate(events.req_ids)}
    positions: dict[str, int] = {}
    for req_id in events.drafted:
        i = index[req_id]
        end = int(events.first_positions[i] + events.num_tokens[i])
        num_drafts = len(output.scheduled_spec_decode_tokens[req_id])
        num_accepted = max(len(sampled.get(req_id, ())) - 1, 0)
        positions[req_id] = end - num_drafts + min(num_accepted, num_drafts)
    return positions


def _only_group(block_ids: Sequence[Sequence[int]] | None) -> Sequence[int]:
    """The block ids of the one KV group; the gate has refused stages with several (G2)."""
    if block_ids is None:
        return ()
    (ids,) = block_ids
    return ids
