"""Device backends. Each is found through the entry-point group ``slotmirror.backends``."""

if __name__ != "slotmirror.backends":
    raise ImportError(
        f"this package is slotmirror.backends, not {__name__!r}: "
        "write `import slotmirror.backends` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
