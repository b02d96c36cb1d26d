"""Which encoder outputs exist, by content hash (spec kv 6).

Bookkeeping only: the outputs themselves lie with the worker, which drops what
`free_encoder_mm_hashes` names, then computes what `scheduled_encoder_inputs` names.
"""

from collections import OrderedDict

from slotmirror.kvcache.request import Request


class EncoderCacheManager:
    """Room for `capacity_tokens` placeholder tokens' worth of encoder outputs.

    An output is shared by all requests whose features have its hash. Unused outputs stay until
    their room is needed, oldest first. Owned by the engine thread.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._num_free = capacity_tokens
        self._num_reclaimable = capacity_tokens
        self._sizes: dict[str, int] = {}
        self._users: dict[str, set[str]] = {}
        self._unused: OrderedDict[str, None] = OrderedDict()
        self._inputs_by_request: dict[str, dict[int, str]] = {}
        self._freed: list[str] = []

    def acquire(self, request: Request, input_id: int) -> bool:
        """Whether the output exists or is computed in this step; if so, keep it for the request."""
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash not in self._sizes:
            return False
        self._keep(request, input_id)
        return True

    def make_room(self, num_tokens: int) -> bool:
        """Whether `num_tokens` fit, after dropping unused outputs as far as needed."""
        if num_tokens > self._num_reclaimable:
            return False
        while num_tokens > self._num_free:
            mm_hash, _ = self._unused.popitem(last=False)
            self._num_free += self._sizes.pop(mm_hash)
            self._freed.append(mm_hash)
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Room for an output that will be computed in this step; `make_room` said it fits."""
        feature = request.mm_features[input_id]
        self._sizes[feature.identifier] = feature.length
        self._unused[feature.identifier] = None
        self._num_free -= feature.length
        self._keep(request, input_id)

    def forget(self, mm_hash: str) -> None:
        """Undo `allocate` for an output that will not be computed after all.

        Requests that counted on it hold it no more: they will ask for it again.
        """
        for request_id in self._users.pop(mm_hash, ()):
            inputs = self._inputs_by_request[request_id]
            for input_id in [i for i, kept in inputs.items() if kept == mm_hash]:
                self._drop_input(request_id, input_id)
        size = self._sizes.pop(mm_hash)
        self._num_free += size
        if mm_hash in self._unused:
            del self._unused[mm_hash]
        else:
            self._num_reclaimable += size

    def input_with(self, request: Request, mm_hash: str) -> int | None:
        """Index of the request's feature that keeps this output, None if none does."""
        return next((i for i, kept in self.inputs_of(request).items() if kept == mm_hash), None)

    def inputs_of(self, request: Request) -> dict[int, str]:
        """Feature indices of the request whose outputs are kept for it, with their hashes."""
        return self._inputs_by_request.get(request.request_id, {})

    def release(self, request: Request, input_id: int) -> None:
        """This request needs the output no more."""
        mm_hash = self._inputs_by_request[request.request_id][input_id]
        self._drop_input(request.request_id, input_id)
        users = self._users.get(mm_hash)
        if users is None:
            return
        users.discard(request.request_id)
        if not users:
            del self._users[mm_hash]
            self._unused[mm_hash] = None
            self._num_reclaimable += self._sizes[mm_hash]

    def release_all(self, request: Request) -> None:
        """This request needs no output any more: it ended, was preempted or cannot start yet."""
        for input_id in sorted(self.inputs_of(request)):
            self.release(request, input_id)

    def take_freed(self) -> list[str]:
        """Hashes of the outputs dropped since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def reset(self) -> None:
        """Forget everything, after weights changed."""
        for container in (self._sizes, self._users, self._unused, self._inputs_by_request):
            container.clear()
        self._freed.clear()
        self._num_free = self._num_reclaimable = self.capacity_tokens

    def _keep(self, request: Request, input_id: int) -> None:
        mm_hash = request.mm_features[input_id].identifier
        if mm_hash in self._unused:
            del self._unused[mm_hash]
            self._num_reclaimable -= self._sizes[mm_hash]
        self._users.setdefault(mm_hash, set()).add(request.request_id)
        self._inputs_by_request.setdefault(request.request_id, {})[input_id] = mm_hash

    def _drop_input(self, request_id: str, input_id: int) -> None:
        inputs = self._inputs_by_request[request_id]
        del inputs[input_id]
        if not inputs:
            del self._inputs_by_request[request_id]
