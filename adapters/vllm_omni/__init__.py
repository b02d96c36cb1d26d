"""A drop-in for vLLM-Omni 0.30's prefix cache: its names and calls, over slotmirror's core.

`install()` puts it in place of `vllm_omni.core.prefix_cache`; `uninstall()` takes it out again.
`replacements.py` lists what is replaced.
"""

from slotmirror.adapters.vllm_omni.switch import install, install_if_asked, uninstall

__all__ = ["install", "install_if_asked", "uninstall"]
