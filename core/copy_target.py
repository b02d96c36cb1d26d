"""Where a device's copies land: pages, bounce buffers, and the pool itself.

A launched copy may use what it reads and writes until it was seen to end. There is one treatment
of whatever can go wrong meanwhile (W5): a launch that fails half-way, a fence that fails, a device
that never answers, an interrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slotmirror.core.backend import CopyPair, DeviceBackend, HostBuffer, Stream
from slotmirror.core.errors import CopyAbandonedError
from slotmirror.core.host_rows import allocate_host
from slotmirror.core.oplog import Mover

_IN_USE: set[CopyTarget] = set()
"""Targets whose copy may run. They stay, with all that the copy uses, whoever else lets go of
them: a device that never finishes a copy may use its memory at any time until the process ends."""


class CopyTarget:
    """Host memory into which one copy at a time is launched; the fence is its own for life.

    Whoever has launched a copy sees to it that it has ended before the next one is launched.

    memory  host buffers that it owns, by name of the key; under None what `scratch` gives
    """

    def __init__(self, name: str, backend: DeviceBackend) -> None:
        self.name = name
        self.fence = backend.new_fence()
        self.memory: dict[str | None, HostBuffer] = {}
        self._backend = backend
        self._pairs: Sequence[CopyPair] = ()
        self._stream: Stream = None
        self._fenced = True

    @property
    def may_run(self) -> bool:
        """Whether a copy was launched that was not seen to end, well or not."""
        return bool(self._pairs)

    def launch(self, pairs: Sequence[CopyPair], stream: Stream, after: Stream) -> None:
        """Start the copy of these pairs, one at least; see `DeviceBackend.copy_to_host`.

        When it raises, part of the copy may run all the same: `arrive` follows on every path.
        """
        self._pairs, self._stream, self._fenced = pairs, stream, False
        _IN_USE.add(self)
        self._backend.copy_to_host(pairs, stream, after, self.fence)
        self._fenced = True

    def arrive(self, mover: Mover) -> None:
        """Wait until the copy has run, if there is one, then free what it read.

        A copy that failed has ended too. One that a shutdown gave up on may still write some day,
        and an interrupt of this thread says nothing about the copy at all.
        """
        if not self._pairs:
            return
        if not self._fenced:
            self._place_fence()
        try:
            mover.wait_fence(self.fence)
        except CopyAbandonedError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                mover.wait_fence(self.fence)
            self.end()
            raise
        self.end()

    def end(self) -> None:
        """The copy was seen to end: what it used is free."""
        self._pairs = ()
        _IN_USE.discard(self)

    def scratch(self, num_bytes: int, *, room: int = 0) -> torch.Tensor:
        """`num_bytes` of uint8; where it must grow, to `room` if that is more. Kept until `close`.

        No copy into the former scratch may run.
        """
        held = self.memory.get(None)
        if held is None or held.tensor.numel() < num_bytes:
            shape, pinned = (max(num_bytes, room),), self._backend.capabilities.pinned_host
            larger = allocate_host(self._backend, shape, torch.uint8, pinned=pinned)
            if held is not None:
                held.close()
            self.memory[None] = held = larger
        return held.tensor[:num_bytes]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of its host buffers, allocator rounding included; any thread."""
        return sum(buffer.reserved_bytes for buffer in list(self.memory.values()))

    def close(self) -> None:
        """Give the memory back, unless a copy may still run."""
        if not self.may_run:
            for buffer in self.memory.values():
                buffer.close()
            self.memory.clear()

    def _place_fence(self) -> None:
        """A fence that was not recorded with its launch is recorded now, behind the copy.

        On a device that is lost for certain nothing runs any more; a copy without a fence on any
        other may run at any time.
        """
        try:
            self.fence.record(self._stream)
        except Exception as error:
            if self._backend.is_lost():
                self.end()
            raise CopyAbandonedError(
                f"no fence could be placed behind a copy into {self.name}: {error}"
            ) from error
        self._fenced = True


def own_stream(backend: DeviceBackend) -> Callable[[], Stream]:
    """A stream of ours, made by the first call and kept: a fork before it is safe (T7).

    Two threads that call it first at once may make two, and both get the one that was put first.
    """
    made: list[Stream] = []

    def stream() -> Stream:
        if not made:
            made.append(backend.new_stream())
        return made[0]

    return stream
