"""Errors of the embedded engine.

EngineError (RuntimeError)      the engine cannot go on; our bug or a failed part
└── RequestError (ValueError)   a request or setting that cannot be served; nothing was changed
"""


class EngineError(RuntimeError):
    """The embedded engine cannot go on."""


class RequestError(EngineError, ValueError):
    """A request or a setting that cannot be served; the engine's state is as before the call."""
