"""Ascend NPUs, through torch_npu."""

from slotmirror.backends.npu.backend import NpuBackend

__all__ = ["NpuBackend"]
