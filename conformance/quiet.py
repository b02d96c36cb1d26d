"""Silence about what is done on purpose."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_core() -> Iterator[None]:
    """No log lines of caches that fail, wait and overflow on purpose."""
    logger = logging.getLogger("slotmirror.core")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
