"""From the device to a page: claim, clone, launch one copy with one fence (walk of a step, 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slotmirror.core.backend import DeviceBackend, Stream
from slotmirror.core.committer import Committer
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import InternalError, StepTooLargeError
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.operations import PageHold, ReleaseTask
from slotmirror.core.oplog import OpLog
from slotmirror.core.own_stream import OwnStream
from slotmirror.core.runtime import Runtime
from slotmirror.core.staging import StagingPage, StagingRing
from slotmirror.core.stats import CacheStats
from slotmirror.core.stranded import keep_for_ever

CopyPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """A step's rows on their way to a claimed page; `clones` must live until its fence.

    `deferred` has the clones among them that also wait for their deferred write, by key;
    `sources` what the copies of rows that lie on the device read, by key.
    """

    page: StagingPage
    clones: tuple[torch.Tensor, ...]
    launched: bool
    deferred: Mapping[str, torch.Tensor]
    sources: Mapping[str, torch.Tensor]


class PageTransfer:
    """Moves the rows of one step to a page. Engine thread only; holds no lock meanwhile."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        ring: StagingRing,
        log: OpLog,
        committer: Committer,
        runtime: Runtime,
        stats: CacheStats,
    ) -> None:
        self._config = config
        self._backend = backend
        self._ring = ring
        self._log = log
        self._committer = committer
        self._runtime = runtime
        self._stats = stats
        self.stream = OwnStream(backend)

    def let_go(self, page: StagingPage) -> None:
        """Drop one hold on a page, which no copy uses any more; wakes a waiting save."""
        self._log.under_lock(lambda: self._ring.let_go(page))

    def hold_again(self, page: StagingPage) -> None:
        """Add a hold to a page that the caller holds."""

        def add() -> None:
            page.holds += 1

        self._log.under_lock(add)

    def deferrable(self, rows: Mapping[str, torch.Tensor], names: frozenset[str]) -> frozenset[str]:
        """Those keys among `names` whose rows lie on the device; the rest is written at once."""
        return frozenset(name for name in names if self._backend.owns(rows[name]))

    def stage(
        self,
        rows: Mapping[str, torch.Tensor],
        deferred: frozenset[str],
        leftovers: LeftoverPack | None,
        num_rows: int,
        unconsumed: Callable[[], Sequence[int]],
    ) -> StagedStep:
        """Claim a page, and launch the copy of these rows and leftovers into it.

        May wait for a page, bounded (W6, S1). Raises `StepTooLargeError` or whatever the
        allocation or clone raised, with the page given back; a copy that fails to launch is
        sticky, since part of it may run (W5).
        """
        if num_rows > self._config.staging_capacity_tokens:
            raise StepTooLargeError(num_rows, self._config.staging_capacity_tokens)
        page = self._claim(unconsumed)
        try:
            pairs = [(tensor, page.rows_tensor(name, num_rows)) for name, tensor in rows.items()]
            if leftovers is not None and leftovers.has_tensors:
                arena = page.arena(leftovers.num_bytes, self._ring.pinned)
                pairs += leftovers.copies_into(arena)
            cloned = [name in deferred for name in rows] + [False] * (len(pairs) - len(rows))
            sources = self._sources([source for source, _ in pairs], cloned)
            clones = {name: sources[i] for i, name in enumerate(rows) if cloned[i]}
            pairs = [(source, target) for source, (_, target) in zip(sources, pairs, strict=True)]
            device_pairs = self._copy_host_tensors(pairs)
            stream, after = self.stream.get(), self._backend.current_stream()
        except BaseException:
            self.let_go(page)
            raise
        if device_pairs:
            self._launch(page, device_pairs, stream, after)
        held = tuple(source for source, _ in device_pairs)
        by_key = {name: sources[i] for i, name in enumerate(rows) if self._backend.owns(sources[i])}
        return StagedStep(page, held, bool(device_pairs), clones, by_key)

    def give_up(self, staged: StagedStep) -> None:
        """A save cannot go on: the page is released, through the log, behind its copy."""
        hold = PageHold(staged.page, self.let_go, staged.clones, staged.launched)
        self._log.append([ReleaseTask("a save that was given up", hold)])
        self._committer.kick()

    def _claim(self, unconsumed: Callable[[], Sequence[int]]) -> StagingPage:
        page = self._log.under_lock(self._ring.try_claim)
        if page is not None:
            return page
        self._stats.page_waits += 1
        started = self._runtime.monotonic()
        try:
            claimed = self._log.wait_until(
                self._ring.try_claim,
                "a free staging page",
                detail=lambda: (
                    f"; unconsumed step ids {list(unconsumed())}: materialize or discard them, "
                    f"or raise staging_depth ({self._config.staging_depth})"
                ),
            )
        finally:
            self._stats.page_wait_s += self._runtime.monotonic() - started
        if claimed is None:
            raise InternalError("the wait for a page ended without one")
        return claimed

    def _copy_host_tensors(self, pairs: list[CopyPair]) -> list[CopyPair]:
        """Copy what already lies on the host, at once; returns the rest, without empty tensors."""
        device_pairs = []
        for source, destination in pairs:
            if self._backend.owns(source):
                if source.numel():
                    device_pairs.append((source, destination))
            else:
                destination.copy_(source)
        return device_pairs

    def _sources(self, tensors: list[torch.Tensor], cloned: list[bool]) -> list[torch.Tensor]:
        """What the copies read: clones where asked, and where a copy outlasts this call (D9)."""
        outlasts = self._backend.capabilities.async_copy
        which = [
            i
            for i, tensor in enumerate(tensors)
            if cloned[i] or (outlasts and self._backend.owns(tensor))
        ]
        sources = list(tensors)
        if which:
            for i, clone in zip(
                which, self._backend.snapshot([tensors[i] for i in which]), strict=True
            ):
                sources[i] = clone
        return sources

    def _launch(
        self, page: StagingPage, pairs: list[CopyPair], stream: Stream, after: Stream
    ) -> None:
        try:
            self._backend.copy_to_host(pairs, stream, after, page.fence)
        except BaseException as error:
            self._log.poison(error, "launching a device→host copy")
            self._give_up(page, pairs)
            self._log.raise_if_failed()

    def _give_up(self, page: StagingPage, pairs: list[CopyPair]) -> None:
        """Part of the copies may run: the page is released behind them, through the log."""
        try:
            page.fence.record(self.stream.get())
        except Exception as error:
            # Without a fence nobody can tell when the page is quiet: it is never used again.
            keep_for_ever(page, pairs)
            self._log.poison(error, "recording a fence behind a failed launch")
            return
        hold = PageHold(page, self.let_go, clones=tuple(source for source, _ in pairs))
        self._log.append([ReleaseTask("a failed save", hold)])
        self._committer.kick()
