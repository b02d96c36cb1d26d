"""The write of a closed batch: device clones → bounce buffers → pool (W2).

The mover owns two bounce buffers and a stream. While the rows in one buffer are scattered, the
copy into the other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch

from slotmirror.core.backend import DeviceBackend, HostRows, Stream
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.copy_target import CopyTarget, own_stream
from slotmirror.core.deferred import DeferredBatch
from slotmirror.core.errors import ConfigError
from slotmirror.core.events import Int64Array
from slotmirror.core.host_rows import as_host_rows
from slotmirror.core.key_spec import KeySpec
from slotmirror.core.operations import PoolWrite
from slotmirror.core.oplog import Mover
from slotmirror.core.write_task import TaskState

Chunk: TypeAlias = tuple[OpenKey, Int64Array, list[torch.Tensor]]
"""Rows of a key copied at once: their slots, -1 for dead rows, and the pieces of its clones."""

Landing: TypeAlias = tuple[CopyTarget, OpenKey, Int64Array, HostRows]
"""A chunk under way: where its copy lands, and the rows that it will have there."""


class BounceBuffers:
    """Two buffers of `copy_chunk_bytes` and a stream; allocated once, used by the mover alone."""

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        self.chunk_bytes = config.copy_chunk_bytes
        self.both = [CopyTarget("a bounce buffer", backend) for _ in range(2)]
        self.stream = own_stream(backend)

    def allocate(self, spec: KeySpec) -> None:
        """Make sure that rows of this key can be copied; engine thread, when the key is opened.

        Raises `ConfigError` if one row is larger than a buffer.
        """
        if spec.row_bytes > self.chunk_bytes:
            raise ConfigError(
                "copy_chunk_bytes",
                self.chunk_bytes,
                f"must hold one row of the deferred key {spec}: {spec.row_bytes} B",
            )
        for bounce in self.both:
            bounce.scratch(self.chunk_bytes)


@dataclass(eq=False)
class DeferredWriteTask(PoolWrite):
    """A closed batch goes to its slots; dead rows are skipped.

    Its copies wait for the present work of `after`. Clones, and the bytes reserved for them, are
    held until every launched copy has run.
    """

    batch: DeferredBatch
    bounces: BounceBuffers
    after: Stream
    release_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        counts = [
            f"{sum(len(clone) for _, clone in clones)} rows of {key.name}"
            for key, clones in self.batch.clones.items()
        ]
        steps = len(self.batch.slots)
        self._summary = f"write deferred batch of {steps} steps: {', '.join(counts)}"

    def move(self, mover: Mover) -> None:
        """Copy chunk i + 1 while chunk i is scattered."""
        landings = map(self._launch, cycle(self.targets), self._chunks())
        # A batch that is closed has rows, so there is a chunk.
        last = next(landings)
        for launched in landings:
            self._scatter(mover, *last)
            last = launched
        last[0].arrive(mover)
        self.progress.advance(TaskState.HOST_READY)
        self._scatter(mover, *last)

    def _chunks(self) -> Iterator[Chunk]:
        """The batch in pieces that fit a bounce buffer, small clones put together."""
        for key, clones in self.batch.clones.items():
            rows_max = self.bounces.chunk_bytes // key.spec.row_bytes
            slots = np.concatenate([self.batch.slots[place] for place, _ in clones])
            sources: list[torch.Tensor] = []
            first = end = 0
            for piece in (piece for _, clone in clones for piece in torch.split(clone, rows_max)):
                if end - first + len(piece) > rows_max:
                    yield key, slots[first:end], sources
                    sources, first = [], end
                sources.append(piece)
                end += len(piece)
            yield key, slots[first:end], sources

    def _launch(self, bounce: CopyTarget, chunk: Chunk) -> Landing:
        key, slots, sources = chunk
        flat = bounce.scratch(len(slots) * key.spec.row_bytes).view(key.spec.dtype)
        rows = flat.view(-1, *key.spec.trailing_shape)
        targets = torch.split(rows, [len(source) for source in sources])
        bounce.launch(list(zip(sources, targets, strict=True)), self.bounces.stream(), self.after)
        return bounce, key, slots, as_host_rows(rows)

    def _scatter(
        self, mover: Mover, bounce: CopyTarget, key: OpenKey, slots: Int64Array, rows: HostRows
    ) -> None:
        bounce.arrive(mover)
        alive = np.flatnonzero(slots >= 0)
        self.stats.deferred_rows_dead += len(rows) - len(alive)
        if len(alive) < len(rows):
            slots, rows = slots[alive], rows[alive]
        if len(rows):
            mover.backend.scatter_slots(key.rows, slots, rows)
        self.stats.rows_written += len(rows)
        self.stats.bytes_written += rows.nbytes

    def let_go(self) -> None:
        if not any(bounce.may_run for bounce in self.targets):
            self.batch.clones.clear()
            self.release_bytes(self.batch.num_bytes)

    def describe(self) -> str:
        return self._summary
