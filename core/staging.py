"""The ring of staging pages: where a step's rows arrive from the device (S1).

A page has one buffer per open key, one fence for life, and a count of holders: the step until it
is consumed, and the write until its rows are in the pool. It returns to the ring when the last
holder lets go. Holder counts live under the log lock, because a released page is progress of the
log like any other: a save that waits for a page waits there.
"""

from __future__ import annotations

import torch

from slotmirror.core.backend import DeviceBackend, HostBuffer, HostRows
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import CacheShutDownError
from slotmirror.core.host_rows import allocate_host, as_host_rows
from slotmirror.core.key_spec import KeySpec

_ARENA_BYTES_MIN = 256


class StagingPage:
    """Host buffers for the rows of one step. Its holder alone touches its bytes."""

    def __init__(self, index: int, backend: DeviceBackend) -> None:
        self.index = index
        self.fence = backend.new_fence()
        self.holds = 0
        self._backend = backend
        self._buffers: dict[str, HostBuffer] = {}
        self._rows: dict[str, HostRows] = {}
        self._arena: HostBuffer | None = None

    def open_key(self, spec: KeySpec, capacity_tokens: int, pinned: bool) -> None:
        """Allocate the key's buffer, `(capacity_tokens, *trailing_shape)`."""
        if spec.name not in self._buffers:
            shape = (capacity_tokens, *spec.trailing_shape)
            buffer = allocate_host(self._backend, shape, spec.dtype, pinned=pinned)
            self._buffers[spec.name] = buffer
            self._rows[spec.name] = as_host_rows(buffer.tensor)

    def forget_key(self, spec: KeySpec) -> None:
        """Give back the buffer of a key that was not opened after all."""
        self._rows.pop(spec.name, None)
        buffer = self._buffers.pop(spec.name, None)
        if buffer is not None:
            buffer.close()

    def rows_tensor(self, key: str, num_rows: int) -> torch.Tensor:
        """The first rows of the key's buffer, `(num_rows, *trailing_shape)`."""
        return self._buffers[key].tensor[:num_rows]

    def rows(self, key: str, num_rows: int) -> HostRows:
        """The same rows as opaque items."""
        return self._rows[key][:num_rows]

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

    @property
    def reserved_bytes(self) -> int:
        """Host bytes that the page holds, allocator rounding included."""
        arena = self._arena.reserved_bytes if self._arena else 0
        return arena + sum(buffer.reserved_bytes for buffer in list(self._buffers.values()))

    def close(self) -> None:
        """Give the memory back; no copy may still use it."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        self._rows.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class StagingRing:
    """All pages. Methods say which of them need the log lock."""

    def __init__(self, config: PrefixCacheConfig, backend: DeviceBackend) -> None:
        self._capacity_tokens = config.staging_capacity_tokens
        self.pinned = backend.capabilities.pinned_host
        self.pages = [StagingPage(index, backend) for index in range(config.staging_depth)]
        self._free = self.pages[::-1]
        self.refuses_claims = False

    def open_key(self, spec: KeySpec) -> None:
        """Allocate the key's buffers on every page; takes no lock."""
        for page in self.pages:
            page.open_key(spec, self._capacity_tokens, self.pinned)

    def forget_key(self, spec: KeySpec) -> None:
        """Undo `open_key` on every page; takes no lock."""
        for page in self.pages:
            page.forget_key(spec)

    def try_claim(self) -> StagingPage | None:
        """A free page, held once; None if there is none. Caller holds the log lock.

        Raises `CacheShutDownError` once the ring refuses claims.
        """
        if self.refuses_claims:
            raise CacheShutDownError("this cache was shut down; make a new manager")
        if not self._free:
            return None
        page = self._free.pop()
        page.holds = 1
        return page

    def let_go(self, page: StagingPage) -> bool:
        """Drop one hold; True if the page became free. Caller holds the log lock."""
        page.holds -= 1
        if page.holds == 0:
            self._free.append(page)
        return page.holds == 0

    @property
    def pages_held(self) -> int:
        """Pages that somebody holds."""
        return len(self.pages) - len(self._free)

    @property
    def reserved_bytes(self) -> int:
        """Host bytes of all pages."""
        return sum(page.reserved_bytes for page in self.pages)

    def close(self) -> None:
        """Give back the memory of pages that nobody holds.

        A page that is still held has a copy that never finished: its memory stays, because the
        device may yet write to it.
        """
        for page in self._free:
            page.close()
