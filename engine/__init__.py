"""The embedded engine: scheduler, models over a paged KV cache, two-stage pipeline, replay."""

if __name__ != "slotmirror.engine":
    raise ImportError(
        f"this package is slotmirror.engine, not {__name__!r}: "
        "write `import slotmirror.engine` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
