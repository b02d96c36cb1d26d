"""What the parts of a scheduler share: the requests and where they stand."""

from dataclasses import dataclass, field

from slotmirror.engine.scheduling.config import SchedulerConfig
from slotmirror.engine.scheduling.encoder import EncoderScheduler
from slotmirror.engine.scheduling.fence import StepFence
from slotmirror.engine.scheduling.request_queue import RequestQueue
from slotmirror.kvcache.manager import KVCacheManager
from slotmirror.kvcache.request import Request, RequestStatus


@dataclass
class SchedulerState:
    """Every request is in exactly one place: `running` (in order of admission), `waiting`, or
    `paused` (sessions between two turns, which keep their blocks and their place in the batch).

    `finished_req_ids` and `preempted_req_ids` collect what the worker is told with the next step.
    """

    config: SchedulerConfig
    kv_cache_manager: KVCacheManager
    encoder: EncoderScheduler
    fence: StepFence
    waiting: RequestQueue
    running: list[Request] = field(default_factory=list)
    paused: dict[str, Request] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    num_preemptions: int = 0

    def preempt(self, request: Request) -> None:
        """Give back the blocks of a request taken out of `running`; it waits at the front.

        Its tokens and their hashes stay, so that it usually hits its own blocks when it resumes.
        """
        self.fence.free(request)
        self.encoder.cache.release_all(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.spec_token_ids = []
        self.waiting.put_back(request)
        self.preempted_req_ids.add(request.request_id)
        self.num_preemptions += 1

    def pause(self, request: Request) -> None:
        """Keep a session that reached the end of a turn, with all it holds."""
        self._take_out(request)
        request.status = RequestStatus.PAUSED
        self.paused[request.request_id] = request

    def resume(self, request: Request) -> None:
        """Queue a paused session whose next turn has begun."""
        del self.paused[request.request_id]
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def idle_sessions(self) -> list[str]:
        """Ids of sessions that hold blocks without running."""
        waiting = (r.request_id for r in self.waiting if r.num_computed_tokens)
        return [*self.paused, *waiting]

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request, wherever it is, and give back what it holds."""
        self._take_out(request)
        request.status = status
        self.encoder.cache.release_all(request)
        self.fence.free(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    def _take_out(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.PAUSED:
            del self.paused[request.request_id]
        else:
            self.waiting.remove((request,))
