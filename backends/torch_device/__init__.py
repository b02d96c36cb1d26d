"""The base of all backends for torch devices, itself the backend `torch` (chosen only by name)."""

from slotmirror.backends.torch_device.backend import TorchDeviceBackend

__all__ = ["TorchDeviceBackend"]
