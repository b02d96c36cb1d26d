"""The ring of staging pages: where a step's rows arrive from the device (S1).

A page owns host memory for the rows of one step, one fence for life, and a count of holders: the
step until it is consumed, and the write until its rows are in the pool. It returns to the ring
when the last holder lets go. Holder counts live under the log lock, because a released page is
progress of the log like any other: a save that waits for a page waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slotmirror.core.backend import DeviceBackend, HostBuffer, Stream
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import CacheShutDownError, CopyAbandonedError
from slotmirror.core.host_rows import allocate_host
from slotmirror.core.oplog import Mover, OpLog, logger
from slotmirror.core.runtime import Runtime
from slotmirror.core.stats import CacheStats
from slotmirror.core.stranded import keep_for_ever

_ARENA_BYTES_MIN = 256


class StagingPage:
    """Memory for the rows of one step. Its holders alone touch its bytes.

    issued   a copy into the page was issued since it was claimed; set by the save
    landed   that copy was seen to end, well or not; until then nobody may let go of the page
    unfenced the stream of a copy that was issued but has no fence behind it yet
    sources  what the copy reads: alive until it has landed
    memory   host buffers, one per open key
    """

    def __init__(self, index: int, backend: DeviceBackend) -> None:
        self.index = index
        self.fence = backend.new_fence()
        self.memory: list[HostBuffer] = []
        self.holds = 0
        self.issued = False
        self.landed = True
        self.unfenced: tuple[Stream] | None = None
        self.sources: Sequence[torch.Tensor] = ()
        self._backend = backend
        self._arena: HostBuffer | None = None

    def arena(self, num_bytes: int, pinned: bool) -> torch.Tensor:
        """`num_bytes` of uint8 scratch for leftovers; grows, and is then kept.

        The page must be claimed and no copy into the former arena may run.
        """
        if self._arena is None or self._arena.tensor.numel() < num_bytes:
            larger = allocate_host(
                self._backend, (max(2 * num_bytes, _ARENA_BYTES_MIN),), torch.uint8, pinned=pinned
            )
            if self._arena is not None:
                self._arena.close()
            self._arena = larger
        return self._arena.tensor[:num_bytes]

    def issue(self, sources: Sequence[torch.Tensor]) -> None:
        """A copy is about to be issued that reads `sources`."""
        self.issued, self.landed = True, False
        self.sources = sources

    def arrive(self, mover: Mover) -> None:
        """Wait until the page's copy has run, then free what it read.

        A copy that failed has ended too. One that a shutdown gave up on may still write some day,
        and an interrupt of this thread says nothing about the copy at all.
        """
        if self.landed:
            return
        self._place_fence(mover)
        try:
            mover.wait_fence(self.fence)
        except CopyAbandonedError:
            raise
        except Exception:
            self.land()
            raise
        except BaseException:
            mover.wait_fence(self.fence)
            self.land()
            raise
        self.land()

    def land(self) -> None:
        """The copy has ended; `issued` stays for whoever still asks how."""
        self.landed, self.sources, self.unfenced = True, (), None

    def _place_fence(self, mover: Mover) -> None:
        """A fence that could not be recorded with its launch is recorded now.

        On a device that is lost for certain nothing runs any more; a copy without a fence on any
        other may run at any time.
        """
        if self.unfenced is None:
            return
        try:
            self.fence.record(self.unfenced[0])
        except Exception as error:
            if mover.backend.is_lost():
                self.land()
            raise CopyAbandonedError(
                f"no fence could be placed behind a copy into page {self.index}: {error}"
            ) from error
        self.unfenced = None

    @property
    def reserved_bytes(self) -> int:
        """Host bytes that the page holds, allocator rounding included."""
        arena = self._arena.reserved_bytes if self._arena else 0
        return arena + sum(buffer.reserved_bytes for buffer in list(self.memory))

    def close(self) -> None:
        """Give the memory back; no copy may still use it."""
        for buffer in self.memory:
            buffer.close()
        self.memory.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class StagingRing:
    """All pages. Takes the log lock itself; `claim` is for the engine thread."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        log: OpLog,
        runtime: Runtime,
        stats: CacheStats,
    ) -> None:
        self._config = config
        self._log = log
        self._runtime = runtime
        self._stats = stats
        self.pages = [StagingPage(index, backend) for index in range(config.staging_depth)]
        self._free = self.pages[::-1]
        self._refuses = False
        self._stranded: list[StagingPage] = []

    def claim(self, unconsumed: Callable[[], Sequence[int]]) -> StagingPage:
        """A free page, held once, with nothing issued; waits for one, bounded (W6, S1).

        Raises `WaitTimeoutError`, which names the unconsumed steps, the log's failure, and
        `CacheShutDownError` once the ring refuses claims.
        """
        with self._log.lock:
            page = self._try_claim()
        if page is not None:
            return page
        self._stats.page_waits += 1
        started = self._runtime.monotonic()
        try:
            return self._log.wait_until(
                self._try_claim,
                "a free staging page",
                detail=lambda: (
                    f"; unconsumed step ids {list(unconsumed())}: materialize or discard them, "
                    f"or raise staging_depth ({self._config.staging_depth})"
                ),
            )
        finally:
            self._stats.page_wait_s += self._runtime.monotonic() - started

    def _try_claim(self) -> StagingPage | None:
        if self._refuses:
            raise CacheShutDownError("this cache was shut down; make a new manager")
        if not self._free:
            return None
        page = self._free.pop()
        page.holds, page.issued = 1, False
        return page

    def let_go(self, page: StagingPage) -> None:
        """Drop one hold, whose owner has seen the page's copy end; wakes a waiting save.

        A page whose copy may still run is stranded: it leaves the ring, and its memory stays with
        the process.
        """
        with self._log.changed:
            page.holds -= 1
            if page.holds:
                return
            landed = page.landed
            (self._free if landed else self._stranded).append(page)
            self._log.changed.notify_all()
        if not landed:
            keep_for_ever(page)
            logger.error("page %d is kept: a copy into it may still run", page.index)

    def refuse_claims(self) -> None:
        """From now on every claim raises, waiting ones too."""
        with self._log.changed:
            self._refuses = True
            self._log.changed.notify_all()

    @property
    def pages_held(self) -> int:
        """Pages that somebody holds."""
        return len(self.pages) - len(self._free) - len(self._stranded)

    @property
    def pages_stranded(self) -> int:
        """Pages that are kept for ever, because a copy into them was never seen to end."""
        return len(self._stranded)

    @property
    def reserved_bytes(self) -> int:
        """Host bytes of all pages but stranded ones."""
        return sum(page.reserved_bytes for page in self.pages if page not in self._stranded)

    @property
    def stranded_bytes(self) -> int:
        """Host bytes of pages whose copy was never seen to end."""
        return sum(page.reserved_bytes for page in self._stranded)

    def close(self) -> None:
        """Give back the memory of pages that nobody holds.

        Whoever still holds a page may read it, or has a copy that never ended: its memory stays.
        """
        for page in self.pages:
            if page in self._free:
                page.close()
            else:
                keep_for_ever(page)
