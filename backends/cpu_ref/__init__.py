"""The CPU reference backend: the definition of the right answer."""

from slotmirror.backends.cpu_ref.backend import CpuRefBackend

__all__ = ["CpuRefBackend"]
