"""Recycled output buffers (M3).

Touching fresh memory for the first time costs several times the copy into it, so an output's
memory is handed out again once the last tensor on it has died. Nobody has to give it back:
each lease is an array whose death returns the memory. That happens in a finaliser, on any
thread, at any moment, so it takes no lock: one change of a deque or a dictionary, which is atomic.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from slotmirror.core.backend import DeviceBackend, HostRows
from slotmirror.core.errors import HostMemoryLimitError
from slotmirror.core.host_rows import allocate_host
from slotmirror.core.key_spec import KeySpec

Lease: TypeAlias = npt.NDArray[np.uint8]
"""Memory for one output; whatever is derived from it keeps it alive."""

_RECYCLED_BYTES_MIN = 1 << 17
"""Where the allocator begins to give freed memory back to the system."""
_KEPT_PER_SIZE = 8
_KEPT_BYTES_PER_SIZE = 1 << 28


class OutputBuffers:
    """Memory for outputs, by size class. Any thread; no lock.

    `backend`, if given, page-locks what is recycled. Outputs of hits are metered, with
    `hit_bytes_max` as their limit (`hit_buffer_bytes_max`): the engine thread checks and leases
    them, finalisers on any thread report deaths, any thread reads.
    """

    def __init__(
        self, backend: DeviceBackend | None = None, hit_bytes_max: int | None = None
    ) -> None:
        self._backend = backend
        self._hit_bytes_max = hit_bytes_max
        self._hit_bytes: dict[int, int] = {}
        self._free: dict[int, deque[Lease]] = {}

    def lease(self, num_bytes: int, *, for_hits: bool = False) -> Lease:
        """At least `num_bytes` of uninitialised memory, cut to `num_bytes`.

        Free again, and with `for_hits` no longer metered, when the last tensor or array on it is
        gone. Small buffers are not recycled: the allocator does that well enough.
        """
        size = _size_class(num_bytes)
        free = self._free_of(size) if size >= _RECYCLED_BYTES_MIN else None
        memory = np.empty(size, np.uint8) if free is None else self._recycled(free, size)
        # A view's base collapses to the array that owns the memory, unless a foreign object
        # stands between: through the memoryview every view holds the lease itself.
        foreign = memoryview(memory)  # type: ignore[arg-type]  # arrays are buffers since 3.12's typing
        lease: Lease = np.frombuffer(foreign, dtype=np.uint8, count=num_bytes)
        if free is not None:
            weakref.finalize(lease, self._take_back, size, memory).atexit = False
        if for_hits:
            # Its number is free for another lease only after the finaliser has run.
            self._hit_bytes[id(lease)] = num_bytes
            weakref.finalize(lease, self._hit_bytes.pop, id(lease)).atexit = False
        return lease

    def check_hits(self, num_bytes: int) -> None:
        """Raise `HostMemoryLimitError` if `num_bytes` more for hits would exceed the limit."""
        alive, limit = self.hit_bytes_alive, self._hit_bytes_max
        if limit is not None and alive + num_bytes > limit:
            raise HostMemoryLimitError(
                f"this step's hits need {num_bytes:,} B of output memory, {alive:,} B are alive, "
                f"hit_buffer_bytes_max is {limit:,}: drop former outputs, raise it, or "
                "schedule fewer hit tokens per step"
            )

    @property
    def hit_bytes_alive(self) -> int:
        """Bytes of hit outputs whose tensors, or gathers, still exist."""
        return sum(list(self._hit_bytes.values()))

    def _free_of(self, size: int) -> deque[Lease]:
        kept = max(1, min(_KEPT_PER_SIZE, _KEPT_BYTES_PER_SIZE // size))
        return self._free.setdefault(size, deque(maxlen=kept))

    def _recycled(self, free: deque[Lease], size: int) -> Lease:
        try:
            return free.pop()
        except IndexError:
            pass
        if self._backend is None:
            return np.empty(size, dtype=np.uint8)
        # The array keeps the buffer's tensor, and so its memory, alive; nobody closes it.
        buffer = allocate_host(self._backend, (size,), torch.uint8, pinned=True)
        memory: Lease = buffer.tensor.numpy()
        return memory

    def _take_back(self, size: int, memory: Lease) -> None:
        free = self._free.get(size)
        if free is not None:
            free.append(memory)

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait to be handed out again."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def close(self) -> None:
        """Forget idle memory; what comes back later finds no deque."""
        self._free.clear()


def rows_tensor(lease: Lease, spec: KeySpec) -> torch.Tensor:
    """The lease as a tensor `(rows, *trailing_shape)` of the key's dtype; keeps it alive."""
    return torch.from_numpy(lease).view(spec.dtype).view(-1, *spec.trailing_shape)


def rows_view(lease: Lease, spec: KeySpec) -> HostRows:
    """The lease as opaque rows; keeps it alive."""
    return lease.view(np.dtype((np.void, spec.row_bytes)))


def _size_class(num_bytes: int) -> int:
    """`num_bytes` rounded up to an eighth of its power of two, so that sizes meet again."""
    if num_bytes < _RECYCLED_BYTES_MIN:
        return max(num_bytes, 1)
    step = 1 << (num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step
