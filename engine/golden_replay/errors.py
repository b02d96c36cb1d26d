"""The error of a file that is no file of vectors, and the checks that raise it."""

from collections.abc import Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")


class VectorFileError(ValueError):
    """The file cannot be replayed: not JSON, of another format, or with a value that is unknown."""


class VectorObject(dict[str, Any]):
    """An object of a file; a field that must be there and is not ends the replay."""

    def __missing__(self, name: str) -> Any:
        raise VectorFileError(f"field {name!r} is missing in an object with {', '.join(self)}")


def known(choices: Mapping[str, Value], name: str, what: str) -> Value:
    """What `name` stands for. Raises VectorFileError for an unknown one."""
    if name not in choices:
        raise VectorFileError(f"{what} {name!r} is not one of {', '.join(choices)}")
    return choices[name]
