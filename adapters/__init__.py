"""Adapters to the engines that people run: their objects become the core's events.

Nothing here imports an engine until one of its workers asks for it.
"""

if __name__ != "slotmirror.adapters":
    raise ImportError(
        f"this package is slotmirror.adapters, not {__name__!r}: "
        "write `import slotmirror.adapters` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
