"""Small managers, schedulers and requests for the tests of the KV cache and the scheduler."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slotmirror.engine.scheduler import Scheduler
from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.output import RequestOutput, SchedulerOutput
from slotmirror.kvcache.block_hashing import RequestBlockHasher
from slotmirror.kvcache.block_pool import BlockIds
from slotmirror.kvcache.hash_functions import KeyFormat, get_hash_function, init_start_value
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import Request, RequestStatus
from slotmirror.kvcache.specs import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

BLOCK_SIZE = 4


def make_hasher(
    hash_block_size: int = BLOCK_SIZE,
    algo: str = "sha256",
    key_format: KeyFormat = KeyFormat.TAGGED,
    seed: str = "0",
) -> RequestBlockHasher:
    """The hasher of an engine process that was started with this PYTHONHASHSEED."""
    start_value = init_start_value(algo, key_format, {"PYTHONHASHSEED": seed})
    return RequestBlockHasher(hash_block_size, get_hash_function(algo), start_value, key_format)


def make_manager(
    num_blocks: int = 16, specs: Sequence[AttentionSpec] = (), **options: Any
) -> KVCacheManager:
    """A manager of one full-attention group with blocks of 4 tokens, or of these groups."""
    groups = tuple(KVCacheGroupSpec(spec) for spec in specs or (FullAttentionSpec(BLOCK_SIZE),))
    return KVCacheManager(KVCacheConfig(num_blocks, groups), 1024, **options)


def make_request(req_id: str, tokens: Iterable[int], **options: Any) -> Request:
    """A request whose blocks of 4 tokens are hashed with seed "0"."""
    options.setdefault("block_hasher", make_hasher())
    return Request(req_id, list(tokens), **options)


def admit(
    manager: KVCacheManager, request: Request, num_new: int | None = None, **options: Any
) -> BlockIds | None:
    """Look up, allocate and count as computed: a whole first step of the request."""
    hits, num_hits = manager.get_computed_blocks(request)
    count = request.num_tokens - num_hits if num_new is None else num_new
    new_blocks = manager.allocate_slots(request, count, num_hits, hits, **options)
    if new_blocks is not None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hits + count
    return new_blocks


def decode(manager: KVCacheManager, request: Request, tokens: Sequence[int]) -> BlockIds | None:
    """Append sampled tokens and give them slots."""
    request.append_output_token_ids(tokens)
    new_blocks = manager.allocate_slots(request, len(tokens))
    request.num_computed_tokens += len(tokens)
    return new_blocks


def preempt(manager: KVCacheManager, request: Request) -> None:
    """What a scheduler does to a preempted request."""
    manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_preemptions += 1


def num_hits(manager: KVCacheManager, request: Request) -> int:
    """Tokens that the request would start with."""
    return manager.get_computed_blocks(request)[1]


def free_order(manager: KVCacheManager) -> list[int]:
    return list(manager.pool.free_queue)


def snapshot(manager: KVCacheManager) -> tuple[object, ...]:
    """Everything that a refused allocation must leave as it was."""
    return (
        free_order(manager),
        manager.pool.ref_counts.copy(),
        manager.pool.block_hashes.copy(),
        [
            {req_id: table.copy() for req_id, table in group.tables.items()}
            for group in manager.coordinator.managers
        ],
    )


def make_scheduler(**options: Any) -> Scheduler:
    """A scheduler of 31 usable blocks of 4 tokens, unless `options` say otherwise."""
    settings: dict[str, Any] = {
        "num_blocks": 32,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
    }
    return Scheduler(SchedulerConfig(**settings | options), clock=lambda: 0.0)


def due_tokens(
    output: SchedulerOutput, known: Mapping[str, Request], token: int = 7
) -> dict[str, list[int]]:
    """One token for every scheduled request that is past its known tokens now."""
    return {
        req_id: [token]
        for req_id in output.num_scheduled_tokens
        if not known[req_id].is_prefill_chunk
    }


class SchedulerRun:
    """A scheduler and its requests; every sampled token is 7."""

    def __init__(self, **options: Any) -> None:
        self.scheduler = make_scheduler(**options)
        self._known: dict[str, Request] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self._known[request.request_id] = request

    def step(self) -> SchedulerOutput:
        """One whole step."""
        output = self.scheduler.schedule()
        self.scheduler.update_from_output(output, due_tokens(output, self._known))
        return output

    def steps(self, count: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(count)]


def run_to_end(scheduler: Scheduler, requests: Iterable[Request]) -> list[RequestOutput]:
    """Step until nothing is left; every sampled token is 7. Returns the last outputs."""
    known = {request.request_id: request for request in requests}
    finished = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        finished += scheduler.update_from_output(output, due_tokens(output, known)).finished
    return finished
