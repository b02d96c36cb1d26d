"""Whole requests to a function of this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.sink import Sink
from slotmirror.core.errors import ConfigError


class CallbackSink(Sink):
    """Calls `callback(request)` on the sink's thread; what it raises stops the engine."""

    def __init__(self, callback: Callable[[RequestRows], object]) -> None:
        self._callback = callback

    def write(self, request: RequestRows) -> None:
        """Call it; it may keep the tensors."""
        self._callback(request)


def callback_named(name: object) -> Callable[[RequestRows], object]:
    """The function that `"package.module:function"` names; `ConfigError` if there is none.

    A name rather than a function, since every worker process must find it.
    """
    rule = 'must name a function as "package.module:function"'
    if not isinstance(name, str) or name.count(":") != 1:
        raise ConfigError("callback", name, rule)
    module, attribute = name.split(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("callback", name, f"{rule}: {error}") from error
    if not callable(found):
        raise ConfigError("callback", name, rule)
    function: Callable[[RequestRows], object] = found
    return function
