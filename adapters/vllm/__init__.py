"""vLLM: `worker_cls="slotmirror.adapters.vllm.Worker"` is all that a deployment changes.

`Worker` is resolved when it is asked for, in a worker process, to the platform's own worker with
slotmirror's mixin; importing this package imports no engine.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name == "Worker":
        from slotmirror.adapters.vllm.platform_worker import worker_class

        return worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
