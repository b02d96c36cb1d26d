"""The backend-neutral core: manager, ordered log, committer, slot table, hit registry.

Knows no accelerator and no engine. Public names are listed once, in ``slotmirror``.
"""

if __name__ != "slotmirror.core":
    raise ImportError(
        f"this package is slotmirror.core, not {__name__!r}: "
        "write `import slotmirror.core` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
