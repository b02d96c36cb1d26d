"""Watches a manager's log: operations are carried out in their order, each once, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from slotmirror.conformance.explorer.scheduler import ScheduleError
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import Operation

_PRIME = 1_000_003
_MASK = (1 << 61) - 1


class LogWatch:
    """Wraps the log's `append` and the mover's carrying out; `order` names the run's log order.

    Two runs have the same order if the same operations were appended and begun in the same
    sequence.
    """

    def __init__(self, cache: PrefixCacheManager) -> None:
        plane = cache._plane
        self._append, self._carry_out = plane.log.append, plane.committer._carry_out
        plane.log.append = self._watch_append  # type: ignore[method-assign]
        plane.committer._carry_out = self._watch_carry_out  # type: ignore[method-assign]
        self._begun = 0
        self._busy: Operation | None = None
        self.order = 0

    def _watch_append(self, operations: Sequence[Operation]) -> None:
        self._append(operations)
        for operation in operations:
            self._note(operation.seq + 1)

    def _watch_carry_out(self, operation: Operation) -> None:
        self._begun += 1
        if operation.seq != self._begun or self._busy is not None:
            raise ScheduleError(
                f"operation {operation.seq} is carried out as number {self._begun}, while "
                f"{self._busy and self._busy.describe()} runs"
            )
        self._busy = operation
        self._note(0)
        try:
            self._carry_out(operation)
        finally:
            self._busy = None
            self._note(1)

    def _note(self, code: int) -> None:
        self.order = (self.order * _PRIME + code + 1) & _MASK
