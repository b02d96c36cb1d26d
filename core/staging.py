"""The ring of staging pages: where a step's rows arrive from the device (S1).

A page owns host memory for the rows of one step and a count of holders: the step until it is
consumed, and the write until its rows are in the pool. It returns to the ring when the last holder
lets go. Holder counts live under the log lock, because a released page is progress of the log like
any other: a save that waits for a page waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slotmirror.core.backend import DeviceBackend
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.copy_target import CopyTarget, own_stream
from slotmirror.core.errors import CacheShutDownError
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.oplog import Mover, Operation, OpLog, logger


class StagingPage(CopyTarget):
    """Memory for the rows of one step. Its holders alone touch its bytes.

    holds   how many hold it
    issued  whether a copy into it was issued since it was claimed, for whoever asks how it ended
    """

    def __init__(self, index: int, backend: DeviceBackend) -> None:
        super().__init__(f"page {index}", backend)
        self.index = index
        self.holds = 0
        self.issued = False


@dataclass(eq=False)
class ReleaseTask(Operation):
    """Whoever held a page gave up on it: the hold is dropped once its copy has run (S3)."""

    whose: str
    page: StagingPage
    drop_hold: Callable[[StagingPage], None]

    def run(self, mover: Mover) -> None:
        self.page.arrive(mover)

    drop = run

    def let_go(self) -> None:
        self.drop_hold(self.page)

    def describe(self) -> str:
        return f"release {self.page.name} of {self.whose}"


class StagingRing:
    """All pages, and the way of a step's rows onto one. Takes the log lock itself.

    `stage` is for the engine thread, which holds no lock meanwhile.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        log: OpLog,
    ) -> None:
        self._backend = backend
        self._log = log
        self._outlasts = backend.capabilities.async_copy
        self.stream = own_stream(backend)
        self.pages = [StagingPage(index, backend) for index in range(config.staging_depth)]
        self._free = self.pages[::-1]
        self._refuses = False

    def stage(
        self,
        keys: Sequence[OpenKey],
        rows: Sequence[torch.Tensor],
        cloned: frozenset[str],
        leftovers: LeftoverPack | None,
        num_rows: int,
    ) -> tuple[StagingPage, list[torch.Tensor]]:
        """Claim a page, and launch one copy of these rows and leftovers into it, with one fence.

        Returns the page, and what the copies read: `sources[i]` for key i, then for leftovers.

        `rows` has one tensor per key; `cloned` names device tensors that must be cloned in any
        case; `num_rows` fit a page. May wait for one, bounded (W6, S1). Raises whatever the
        allocation or clone raised, with the page given back; a copy that fails to launch is
        sticky, since part of it may run (W5).
        """
        page = self._claim()
        try:
            tensors = list(rows)
            targets = [key.pages[page.index].first(num_rows)[0] for key in keys]
            if leftovers is not None and leftovers.num_bytes:
                arena = page.scratch(leftovers.num_bytes, room=2 * leftovers.num_bytes)
                for source, target in leftovers.copies_into(arena):
                    tensors.append(source)
                    targets.append(target)
            sources = tensors
            if self._outlasts or cloned:
                sources = self._sources(tensors, [key.name in cloned for key in keys])
            pairs = []
            for source, target in zip(sources, targets, strict=True):
                if not self._backend.owns(source):
                    target.copy_(source)
                elif source.numel():
                    pairs.append((source, target))
            page.issued = bool(pairs)
            if pairs:
                page.launch(pairs, self.stream(), self._backend.current_stream())
        except BaseException as error:
            if not page.may_run:
                self.let_go(page)
                raise
            self._log.poison(error, "launching a device→host copy")
            self.give_up(page, "a failed save")
            self._log.raise_if_failed()
        return page, sources

    def _sources(
        self, tensors: Sequence[torch.Tensor], asked: Sequence[bool]
    ) -> list[torch.Tensor]:
        """What the copies read: clones where asked, and where a copy outlasts this call (D9)."""
        sources = list(tensors)
        if self._outlasts:
            asked = [self._backend.owns(tensor) for tensor in tensors]
        which = [i for i, clone in enumerate(asked) if clone]
        clones = self._backend.snapshot([tensors[i] for i in which]) if which else []
        for i, clone in zip(which, clones, strict=True):
            sources[i] = clone
        return sources

    def give_up(self, page: StagingPage, whose: str) -> None:
        """A save or a step is given up: its hold is dropped by the log, behind the copy (S3)."""
        self._log.append([ReleaseTask(whose, page, self.let_go)])

    def _claim(self) -> StagingPage:
        """A free page, held once, with no copy under way; waits for one, bounded (W6, S1).

        Raises `WaitTimeoutError`, which names the unconsumed steps, the log's failure, and
        `CacheShutDownError` once the ring refuses claims.
        """
        # Nobody else takes pages: what is there stays there.
        if not self._free:
            self._log.stats.page_waits += 1
            started = self._log.runtime.monotonic()
            try:
                self._log.wait_until(
                    lambda: bool(self._free) or self._refuses,
                    f"a free staging page (staging_depth {len(self.pages)}: materialize or discard "
                    "unconsumed steps, or raise it)",
                )
            finally:
                self._log.stats.page_wait_s += self._log.runtime.monotonic() - started
        with self._log.lock:
            if self._refuses:
                raise CacheShutDownError("this cache was shut down; make a new manager")
            page = self._free.pop()
            page.holds = 1
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
            is_stranded = page.may_run
            if not is_stranded:
                self._free.append(page)
            self._log.changed.notify_all()
        if is_stranded:
            logger.error("%s is kept: a copy into it may still run", page.name)

    def refuse_claims(self) -> None:
        """From now on every claim raises, waiting ones too."""
        with self._log.changed:
            self._refuses = True
            self._log.changed.notify_all()

    @property
    def pages_held(self) -> int:
        """Pages that somebody holds."""
        return sum(page.holds > 0 for page in self.pages)

    @property
    def stranded(self) -> list[StagingPage]:
        """Pages that are kept for ever, because a copy into them was never seen to end."""
        return [page for page in self.pages if page.may_run and not page.holds]

    def memory_stats(self) -> dict[str, int]:
        """Host bytes of stranded pages, and of all others."""
        stranded = sum(page.reserved_bytes for page in self.stranded)
        every = sum(page.reserved_bytes for page in self.pages)
        return {"staging_bytes": every - stranded, "stranded_bytes": stranded}

    def close(self) -> None:
        """Give back the memory of pages that nobody holds.

        Whoever still holds a page may read it, or has a copy that never ended.
        """
        for page in self._free:
            page.close()
