"""Page-locking of existing memory through the CUDA runtime that torch has loaded."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("slotmirror.backends")

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device's context, not only the current one's."""


class CudaRegistration:
    """`HostRegistration` over `torch.cuda.cudart()`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def register(self, address: int, num_bytes: int) -> None:
        """Raises `RuntimeError` with the runtime's error code."""
        error = int(self._module.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes failed with code {error}")

    def unregister(self, address: int) -> None:
        """A refusal is only logged: the device is lost, or the process ends with the memory."""
        error = int(self._module.cudart().cudaHostUnregister(address))
        if error:
            logger.warning("cudaHostUnregister failed with code %d", error)
