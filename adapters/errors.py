"""Errors that only an adapter can raise; the tree is that of `core/errors.py`."""

from __future__ import annotations

from slotmirror.core.errors import EngineDivergenceError, PrefixCacheError


class SlotMismatchError(EngineDivergenceError):
    """The slots that we derived differ from the engine's own (debug mode)."""


class DeliveryError(PrefixCacheError, RuntimeError):
    """Rows could not be handed to their sink; sticky, raised at the engine's next step."""


class SinkFullError(DeliveryError):
    """The sink took no more rows within the configured wait, or at once where it must not wait."""


class DeliveryTimeoutError(DeliveryError, TimeoutError):
    """A flush did not end within its bound; what was pending still is."""
