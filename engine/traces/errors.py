"""The one error of the trace readers."""

from pathlib import Path

from slotmirror.core.errors import UsageError


class TraceError(UsageError):
    """A trace file that cannot be used: unreadable, or with a line that breaks its format.

    Attributes:
        path: the file.
        line: the line's number, from 1; None when the file as a whole is at fault.
        reason: what is wrong, without the place.
    """

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path = path
        self.line = line
        self.reason = reason
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {reason}")
