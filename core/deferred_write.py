"""The write of a closed batch: device clones → bounce buffers → pool (W2).

The mover owns two bounce buffers and a stream. While the rows in one buffer are scattered, the
copy into the other runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend, Fence, HostBuffer, Stream
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.deferred import ClosedBatch, ReleaseBytes
from slotmirror.core.errors import ConfigError, CopyAbandonedError, InternalError
from slotmirror.core.events import Int64Array
from slotmirror.core.host_rows import allocate_host, as_host_rows
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.oplog import Mover, Operation, logger
from slotmirror.core.own_stream import OwnStream
from slotmirror.core.stats import CacheStats
from slotmirror.core.stranded import keep_for_ever
from slotmirror.core.write_task import TaskProgress, TaskState


@dataclass(slots=True, eq=False)
class _Bounce:
    """One bounce buffer: its memory, its fence for life, and whether a copy may run into it."""

    buffer: HostBuffer
    fence: Fence
    launched: bool = False

    def rows(self, chunk: _Chunk) -> torch.Tensor:
        """The chunk's rows in this buffer, `(rows, *trailing_shape)`."""
        spec = chunk.key.spec
        num_rows = len(chunk.slots)
        flat = self.buffer.tensor[: num_rows * spec.row_bytes].view(spec.dtype)
        return flat.view(num_rows, *spec.trailing_shape)


class BounceBuffers:
    """Two buffers of `copy_chunk_bytes` and a stream; allocated once, used by the mover alone."""

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        self._chunk_bytes = config.copy_chunk_bytes
        self._backend = backend
        self._made: list[_Bounce] = []
        self.stream = OwnStream(backend)

    def allocate(self, spec: KeySpec) -> None:
        """Make sure that rows of this key can be copied; engine thread, when the key is opened.

        Raises `ConfigError` if one row is larger than a buffer.
        """
        if spec.row_bytes > self._chunk_bytes:
            raise ConfigError(
                "copy_chunk_bytes",
                self._chunk_bytes,
                f"must hold one row of the deferred key {spec}: {spec.row_bytes} B",
            )
        while len(self._made) < 2:
            self._made.append(self._new())

    def _new(self) -> _Bounce:
        pinned = self._backend.capabilities.pinned_host
        buffer = allocate_host(self._backend, (self._chunk_bytes,), torch.uint8, pinned=pinned)
        return _Bounce(buffer, self._backend.new_fence())

    def rows_max(self, spec: KeySpec) -> int:
        """Rows of the key that fit one buffer."""
        return self._chunk_bytes // spec.row_bytes

    @property
    def pair(self) -> tuple[_Bounce, _Bounce]:
        """The two buffers; `allocate` comes first."""
        if len(self._made) < 2:
            raise InternalError("a deferred write without bounce buffers: no deferred key is open")
        return self._made[0], self._made[1]

    @property
    def reserved_bytes(self) -> int:
        """Host bytes held, allocator rounding included."""
        return sum(bounce.buffer.reserved_bytes for bounce in self._made)

    def close(self) -> None:
        """Give the memory back, except where a copy may still run."""
        for bounce in self._made:
            if not bounce.launched:
                bounce.buffer.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Consecutive rows of a key's clones that are copied at once; `slots` has -1 for dead rows."""

    key: OpenKey
    sources: list[torch.Tensor]
    slots: Int64Array


class DeferredWriteTask(Operation):
    """A closed batch goes to its slots; dead rows are skipped.

    Clones, and the bytes reserved for them, are held until every launched copy has run.
    """

    def __init__(
        self,
        batch: ClosedBatch,
        bounces: BounceBuffers,
        after: Stream,
        release_bytes: ReleaseBytes,
        progress: TaskProgress,
        stats: CacheStats,
    ) -> None:
        self._batch: ClosedBatch | None = batch
        self._summary = (
            f"write deferred batch of {batch.num_steps} steps: "
            f"{', '.join(f'{len(s)} rows of {k.spec.name}' for k, s in batch.slots.items())}"
        )
        self._num_bytes = batch.num_bytes
        self._bounces = bounces
        self._after = after
        self._release_bytes = release_bytes
        self.progress = progress
        self._stats = stats

    def run(self, mover: Mover) -> None:
        self.progress.advance(TaskState.COPYING)
        try:
            self._move(mover)
        except BaseException:
            self.progress.fail()
            self._await_launched(mover)
            raise
        self.progress.advance(TaskState.WRITTEN)

    def drop(self, mover: Mover) -> None:
        self.progress.fail()

    def let_go(self) -> None:
        if any(bounce.launched for bounce in self._bounces.pair):
            keep_for_ever(self)
            return
        self._batch = None
        self._release_bytes(self._num_bytes)

    def state(self) -> str:
        return self.progress.state.value

    def describe(self) -> str:
        return self._summary

    def _move(self, mover: Mover) -> None:
        """Copy chunk i + 1 while chunk i is scattered."""
        waiting: tuple[_Bounce, _Chunk] | None = None
        for number, chunk in enumerate(self._chunks()):
            bounce = self._bounces.pair[number % 2]
            self._launch(mover, bounce, chunk)
            if waiting is not None:
                self._scatter(mover, *waiting)
            waiting = (bounce, chunk)
        if waiting is not None:
            mover.wait_fence(waiting[0].fence)
        self.progress.advance(TaskState.HOST_READY)
        if waiting is not None:
            self._scatter(mover, *waiting)

    def _chunks(self) -> Iterator[_Chunk]:
        """The batch in pieces that fit a bounce buffer, small clones put together."""
        if self._batch is None:
            raise InternalError("a deferred write was run after it had let go of its batch")
        batch = self._batch
        for key, clones in batch.clones.items():
            rows_max = self._bounces.rows_max(key.spec)
            sources: list[torch.Tensor] = []
            first = end = 0
            for piece in (piece for clone in clones for piece in torch.split(clone, rows_max)):
                if end - first + len(piece) > rows_max:
                    yield _Chunk(key, sources, batch.slots[key][first:end])
                    sources, first = [], end
                sources.append(piece)
                end += len(piece)
            yield _Chunk(key, sources, batch.slots[key][first:end])

    def _launch(self, mover: Mover, bounce: _Bounce, chunk: _Chunk) -> None:
        target = bounce.rows(chunk)
        ends = np.cumsum([len(source) for source in chunk.sources]).tolist()
        pairs = [
            (source, target[end - len(source) : end])
            for source, end in zip(chunk.sources, ends, strict=True)
        ]
        stream = self._bounces.stream.get()
        bounce.launched = True
        try:
            mover.backend.copy_to_host(pairs, stream, self._after, bounce.fence)
        except BaseException:
            # Part of the copies may run: put the fence behind them.
            bounce.fence.record(stream)
            raise

    def _scatter(self, mover: Mover, bounce: _Bounce, chunk: _Chunk) -> None:
        mover.wait_fence(bounce.fence)
        bounce.launched = False
        rows = as_host_rows(bounce.rows(chunk))
        alive = np.flatnonzero(chunk.slots >= 0)
        if len(alive) == len(rows):
            mover.backend.scatter_slots(chunk.key.rows, chunk.slots, rows)
        elif len(alive):
            mover.backend.scatter_slots(chunk.key.rows, chunk.slots[alive], rows[alive])
        self._stats.rows_written += len(alive)
        self._stats.bytes_written += len(alive) * chunk.key.spec.row_bytes
        self._stats.deferred_rows_dead += len(rows) - len(alive)

    def _await_launched(self, mover: Mover) -> None:
        """The write failed: wait for copies that may still run, so that clones can be freed."""
        for bounce in self._bounces.pair:
            try:
                if bounce.launched:
                    mover.wait_fence(bounce.fence)
            except CopyAbandonedError:
                continue
            except Exception as error:
                logger.error("a copy of a failed deferred write failed too: %s", error)
            bounce.launched = False
