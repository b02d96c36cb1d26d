"""Proof by trial: a simulated device, a schedule explorer, golden traces.

What a backend's author, and everybody who doubts, can run: nothing here is needed to serve.
"""

if __name__ != "slotmirror.conformance":
    raise ImportError(
        f"this package is slotmirror.conformance, not {__name__!r}: "
        "write `import slotmirror.conformance` "
        "(install with `pip install -e .`; the folder at the repository root is only its source)"
    )
