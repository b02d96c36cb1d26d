"""Putting the drop-in in place of vLLM-Omni's own cache, and taking it out again."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType

ENVIRONMENT_VARIABLE = "SLOTMIRROR_VLLM_OMNI"

_PACKAGE = "vllm_omni.core.prefix_cache"
_MODULES = ("interface", "group_view", "manager", "runner_mixin")
_replaced: list[tuple[ModuleType, str, object]] = []


def install() -> None:
    """Replace the cache in this process, before an engine starts; twice is harmless.

    The names are replaced where they are defined and in every module of vLLM-Omni that has
    imported them already; modules imported later find the replaced ones.
    """
    if _replaced:
        return
    # Imported when asked for: vLLM imports this module in every process.
    from slotmirror.adapters.vllm_omni.replacements import REPLACEMENTS

    package = import_module(_PACKAGE)
    for name in _MODULES:
        import_module(f"{_PACKAGE}.{name}")
    theirs = {name: getattr(package, name) for name in REPLACEMENTS}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "vllm_omni"]:
        for name, original in theirs.items():
            if getattr(module, name, None) is original:
                _replaced.append((module, name, original))
                setattr(module, name, REPLACEMENTS[name])


def uninstall() -> None:
    """Put vLLM-Omni's own cache back; managers made meanwhile stay what they are."""
    while _replaced:
        module, name, original = _replaced.pop()
        setattr(module, name, original)


def install_if_asked() -> None:
    """The entry point that vLLM calls in every process: `SLOTMIRROR_VLLM_OMNI=1` asks."""
    if os.environ.get(ENVIRONMENT_VARIABLE) == "1":
        install()
