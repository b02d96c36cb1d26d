"""A stream of ours, made when it is first used: a fork before that is safe (T7)."""

from __future__ import annotations

from slotmirror.core.backend import DeviceBackend, Stream


class OwnStream:
    """One stream, made by the thread that uses it first, and kept."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend = backend
        self._made: list[Stream] = []

    def get(self) -> Stream:
        """The stream; any stream value is possible, None too."""
        if not self._made:
            self._made.append(self._backend.new_stream())
        return self._made[0]
