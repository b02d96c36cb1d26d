"""From the device to a page: claim, clone, launch one copy with one fence (walk of a step, 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slotmirror.core.backend import DeviceBackend, Stream
from slotmirror.core.block_pool import OpenKey
from slotmirror.core.committer import Committer
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import StepTooLargeError
from slotmirror.core.leftovers import LeftoverPack
from slotmirror.core.operations import ReleaseTask
from slotmirror.core.oplog import OpLog
from slotmirror.core.own_stream import OwnStream
from slotmirror.core.staging import StagingPage, StagingRing

CopyPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StagedRows:
    """A step's rows on their way to a claimed page; `sources[i]` is what key i's copy reads."""

    page: StagingPage
    sources: Sequence[torch.Tensor]


class PageTransfer:
    """Moves the rows of one step to a page. Engine thread only; holds no lock meanwhile."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        backend: DeviceBackend,
        ring: StagingRing,
        log: OpLog,
        committer: Committer,
    ) -> None:
        self._capacity_tokens = config.staging_capacity_tokens
        self._backend = backend
        self._ring = ring
        self._log = log
        self._committer = committer
        capabilities = backend.capabilities
        self._outlasts = capabilities.async_copy
        self._pinned = capabilities.pinned_host
        self.stream = OwnStream(backend)

    def stage(
        self,
        keys: Sequence[OpenKey],
        rows: Sequence[torch.Tensor],
        cloned: frozenset[str],
        leftovers: LeftoverPack | None,
        num_rows: int,
        unconsumed: Callable[[], Sequence[int]],
    ) -> StagedRows:
        """Claim a page, and launch the copy of these rows and leftovers into it.

        `rows` has one tensor per key, `cloned` names those that must be cloned in any case. May
        wait for a page, bounded (W6, S1). Raises `StepTooLargeError` or whatever the allocation or
        clone raised, with the page given back; a copy that fails to launch is sticky, since part
        of it may run (W5).
        """
        if num_rows > self._capacity_tokens:
            raise StepTooLargeError(num_rows, self._capacity_tokens)
        page = self._ring.claim(unconsumed)
        try:
            tensors = list(rows)
            targets = [key.pages[page.index].first(num_rows)[0] for key in keys]
            if leftovers is not None and leftovers.num_bytes:
                arena = page.arena(leftovers.num_bytes, self._pinned)
                for source, target in leftovers.copies_into(arena):
                    tensors.append(source)
                    targets.append(target)
            sources: Sequence[torch.Tensor] = tensors
            if self._outlasts or cloned:
                sources = self._sources(tensors, [key.name in cloned for key in keys])
            pairs = self._copy_host_tensors(sources, targets)
            stream, after = self.stream.get(), self._backend.current_stream()
        except BaseException:
            self._ring.let_go(page)
            raise
        if pairs:
            self._launch(page, pairs, stream, after)
        return StagedRows(page, sources)

    def give_up(self, page: StagingPage, whose: str) -> None:
        """A save cannot go on: the page is released, through the log, behind its copy."""
        self._log.append([ReleaseTask(whose, page, self._ring.let_go)])
        self._committer.kick()

    def _sources(
        self, tensors: list[torch.Tensor], cloned: Sequence[bool]
    ) -> Sequence[torch.Tensor]:
        """What the copies read: clones where asked, and where a copy outlasts this call (D9)."""
        asked = [*cloned, *[False] * (len(tensors) - len(cloned))]
        which = [
            i
            for i, tensor in enumerate(tensors)
            if asked[i] or (self._outlasts and self._backend.owns(tensor))
        ]
        clones = self._backend.snapshot([tensors[i] for i in which]) if which else []
        sources = list(tensors)
        for i, clone in zip(which, clones, strict=True):
            sources[i] = clone
        return sources

    def _copy_host_tensors(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[CopyPair]:
        """Copy what already lies on the host, at once; returns the rest, without empty tensors."""
        device_pairs = []
        for source, target in zip(sources, targets, strict=True):
            if not self._backend.owns(source):
                target.copy_(source)
            elif source.numel():
                device_pairs.append((source, target))
        return device_pairs

    def _launch(
        self, page: StagingPage, pairs: list[CopyPair], stream: Stream, after: Stream
    ) -> None:
        page.issue([source for source, _ in pairs])
        try:
            self._backend.copy_to_host(pairs, stream, after, page.fence)
        except BaseException as error:
            # Part of the copies may run: the mover puts a fence behind them and waits for it.
            page.unfenced = (stream,)
            self._log.poison(error, "launching a device→host copy")
            self.give_up(page, "a failed save")
            self._log.raise_if_failed()
