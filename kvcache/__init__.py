"""The KV prefix cache: chained block hashes, block pool, manager and coordinators."""

if __name__ != "slotmirror.kvcache":
    raise ImportError(
        f"this package is slotmirror.kvcache, not {__name__!r}: "
        "write `import slotmirror.kvcache` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
