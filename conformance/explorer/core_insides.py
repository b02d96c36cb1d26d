"""The only place where the explorer looks inside the core; a change of the core's inside ends here.

What it needs beyond the public calls: to see each operation of the log when it is appended and
when it is carried out, and to let small output buffers be recycled as large ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slotmirror.core import buffers
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import Operation

_SMALL_BYTES = 16

Append = Callable[[Sequence[Operation]], None]
CarryOut = Callable[[Operation], None]


def wrap_log(
    cache: PrefixCacheManager,
    append: Callable[[Append], Append],
    carry_out: Callable[[CarryOut], CarryOut],
) -> None:
    """Put something of ours around the log's `append` and the mover's carrying out."""
    log, mover = cache._plane.log, cache._plane.committer
    log.append = append(log.append)  # type: ignore[method-assign, assignment]
    mover._carry_out = carry_out(mover._carry_out)  # type: ignore[method-assign, assignment]


@contextmanager
def small_outputs_recycled() -> Iterator[None]:
    """Inside, output buffers of any size are handed out again, not large ones alone (M3)."""
    kept, buffers._RECYCLED_BYTES_MIN = buffers._RECYCLED_BYTES_MIN, _SMALL_BYTES
    try:
        yield
    finally:
        buffers._RECYCLED_BYTES_MIN = kept
