"""The scheduler's output as the core's events: translation, nothing more (stage-cache spec, K3).

What an adapter does for a foreign engine, here for the embedded one.
"""

from collections.abc import Sequence

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.core.events import AdmittedRequest, StepEvents
from slotmirror.engine.scheduling.output import SchedulerOutput
from slotmirror.kvcache.block_pool import BlockIds


class StepTranslator:
    """Turns every `SchedulerOutput`, in order, into `StepEvents`. Engine thread only."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._tables = BlockTables(num_blocks=num_blocks, block_size=block_size)

    def translate(self, output: SchedulerOutput) -> StepEvents:
        """The events of one step; the block tables follow from the outputs alone."""
        cached = output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        resumed: list[AdmittedRequest] = []
        appended: dict[str, Sequence[int]] = {}
        for req_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[req_id] = num_computed
            if block_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                resumed.append(AdmittedRequest(req_id, num_computed, _only_group(block_ids)))
            else:
                appended[req_id] = _only_group(block_ids)
        return self._tables.step(
            ended=sorted(output.finished_req_ids),
            preempted=sorted(output.preempted_req_ids),
            new=[
                AdmittedRequest(r.req_id, r.num_computed_tokens, _only_group(r.block_ids))
                for r in output.scheduled_new_reqs
            ],
            resumed=resumed,
            appended=appended,
            num_computed_tokens=computed,
            num_scheduled_tokens=output.num_scheduled_tokens,
        )


def _only_group(block_ids: BlockIds) -> Sequence[int]:
    """The block ids of the one KV group; a stage-output cache mirrors exactly one (spec, G2)."""
    (ids,) = block_ids
    return ids
