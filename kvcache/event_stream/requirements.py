"""The packages of the extra `events`, imported when they are first needed."""

import importlib
from types import ModuleType


def load(module: str) -> ModuleType:
    """Import `msgspec.msgpack` or `zmq`. Raises ModuleNotFoundError naming the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise ModuleNotFoundError(
            f"KV events on the wire need {module.partition('.')[0]}: "
            "install it with `pip install 'slotmirror[events]'`"
        ) from cause
