"""Which request may start when: the turns of a conversation follow one another."""

from collections.abc import Sequence

from slotmirror.engine.errors import RequestError
from slotmirror.engine.pipeline_types import PipelineRequest


class TurnOrder:
    """Requests by what they wait for.

    Raises `RequestError` for a duplicate id and for an `after` that names no request standing
    before; so there can be no circle.
    """

    def __init__(self, requests: Sequence[PipelineRequest]) -> None:
        self._followers: dict[str, list[PipelineRequest]] = {}
        self._first: list[PipelineRequest] = []
        for request in requests:
            if request.req_id in self._followers:
                raise RequestError(f"request id {request.req_id!r} is used twice")
            if request.after is None:
                self._first.append(request)
            elif request.after in self._followers:
                self._followers[request.after].append(request)
            else:
                raise RequestError(
                    f"request {request.req_id!r} comes after {request.after!r}, "
                    "which is not among the requests before it"
                )
            self._followers[request.req_id] = []

    def first(self) -> Sequence[PipelineRequest]:
        """Those that wait for nothing."""
        return self._first

    def released_by(self, req_id: str) -> Sequence[PipelineRequest]:
        """Those that waited for `req_id` to leave the pipeline."""
        return self._followers.pop(req_id)
