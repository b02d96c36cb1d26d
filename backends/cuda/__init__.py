"""NVIDIA GPUs, and AMD GPUs with a ROCm build of torch."""

from slotmirror.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
