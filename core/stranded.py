"""Memory that a copy may still use although everybody has given up on it.

A device that never finishes a copy may write to its page, or read its clones, at any later time.
What it may touch is kept here until the process ends, whoever else lets go of it.
"""

from __future__ import annotations

_KEPT: list[object] = []


def keep_for_ever(*memory: object) -> None:
    """Hold these objects until the process ends; any thread."""
    _KEPT.append(memory)
