"""Watches a manager's log: operations are carried out in their order, each once, one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slotmirror.conformance.explorer.core_insides import Append, CarryOut, wrap_log
from slotmirror.conformance.explorer.scheduler import ScheduleError
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import Operation

_PRIME = 1_000_003
_MASK = (1 << 61) - 1
_TAIL = 20


class LogWatch:
    """Sees every operation; `order` names the run's log order, `tail` has the last operations.

    Two runs have the same order if the same operations were appended and begun in the same
    sequence.
    """

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._begun = 0
        self._busy: Operation | None = None
        self.order = 0
        self.tail: deque[str] = deque(maxlen=_TAIL)
        wrap_log(cache, self._around_append, self._around_carry_out)

    def _around_append(self, append: Append) -> Append:
        def watched(operations: Sequence[Operation]) -> None:
            append(operations)
            for operation in operations:
                self._note(operation.seq + 1)
                self.tail.append(f"{operation.seq} {operation.describe()}")

        return watched

    def _around_carry_out(self, carry_out: CarryOut) -> CarryOut:
        return lambda operation: self._carried_out(operation, carry_out)

    def _carried_out(self, operation: Operation, carry_out: CarryOut) -> None:
        self._begun += 1
        if operation.seq != self._begun or self._busy is not None:
            raise ScheduleError(
                f"operation {operation.seq} is carried out as number {self._begun}, while "
                f"{self._busy and self._busy.describe()} runs"
            )
        self._busy = operation
        self._note(0)
        try:
            carry_out(operation)
        finally:
            self._busy = None
            self._note(1)

    def _note(self, code: int) -> None:
        self.order = (self.order * _PRIME + code + 1) & _MASK
