"""How the kit computes on the device under test.

The interface moves rows but computes nothing; the checks need device tensors, work that takes a
while, and a clock. The default does all of it with torch on `backend.device`, which serves every
device that torch drives. Authors of others subclass it (`BackendConformance.workbench`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from slotmirror.core.backend import DeviceBackend

BUSY_S = 0.3
"""How long the engine's stream is kept busy: much longer than a launch, on a loaded machine too."""

WAIT_S = 60.0
"""The longest that the kit waits for the device."""

FAILING_MEMBERS = ("alloc_host", "snapshot", "copy_to_host", "gather_slots", "scatter_slots")

_BUSY_SIDE = 4096
_MEASURED_ROUNDS = 8
_BUSY_ROUNDS_MAX = 800
"""Below the about thousand launches that a driver queues before it holds the launching thread."""


class RequestedFailure(RuntimeError):
    """A failure that a check asked for."""


class Workbench:
    """One backend on its device; used by one thread, which it binds.

    can_be_busy  work on the engine's stream runs while the launching thread goes on
    """

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self._scratch: torch.Tensor | None = None
        self._rounds = 0
        backend.bind_thread(backend.device)

    @property
    def can_be_busy(self) -> bool:
        """The host is its own engine: what it computes is there when the call returns."""
        return self.backend.device.type != "cpu"

    def active(self) -> AbstractContextManager[object]:
        """Entered around each check, and in each thread that a check starts."""
        return nullcontext()

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A device tensor with the values of a host tensor, ready when this returns."""
        tensor = torch.empty_like(values, device=self.backend.device)
        tensor.copy_(values)
        return tensor

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Queue on the engine's stream: `tensor` becomes equal to `values`, a device tensor."""
        tensor.copy_(values)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Inside, the engine's stream has at least `BUSY_S` of work before what is queued next."""
        if self.can_be_busy:
            self._compute(self._busy_rounds())
        yield

    def now(self) -> float:
        """Seconds of the clock by which waits are bounded."""
        return time.monotonic()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the device's runtime says that this host memory is page-locked."""
        return tensor.is_pinned()

    def current_device_index(self) -> int | None:
        """The device that is current in the calling thread; None where nothing can tell."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != self.backend.device.type:
            return None
        return torch.accelerator.current_device_index()

    def failures(self) -> Mapping[str, Callable[[], None]]:
        """Members of the backend that can be made to fail: call, then the next call of it raises.

        By default the instance's member is replaced for one call. A backend that can let its
        device fail, half-way for instance, overrides this.
        """
        return {name: partial(self._fail_next, name) for name in FAILING_MEMBERS}

    def violations(self) -> list[str]:
        """What the device saw done against its rules since it was made."""
        return []

    def _fail_next(self, name: str) -> None:
        def fail(*_: object, **__: object) -> None:
            delattr(self.backend, name)
            raise RequestedFailure(f"{name} was made to fail")

        setattr(self.backend, name, fail)

    def _compute(self, rounds: int) -> None:
        if self._scratch is None:
            side = (_BUSY_SIDE, _BUSY_SIDE)
            self._scratch = torch.zeros(side, device=self.backend.device)
        for _ in range(rounds):
            torch.mm(self._scratch, self._scratch)

    def _busy_rounds(self) -> int:
        """How many rounds take `BUSY_S`; measured once, by a fence behind a few of them."""
        if not self._rounds:
            fence = self.backend.new_fence()
            self._compute(1)
            started_s = 0.0
            for rounds in (1, _MEASURED_ROUNDS):
                started_s = self.now()
                self._compute(rounds)
                fence.record(self.backend.current_stream())
                fence.wait(WAIT_S)
            per_round_s = (self.now() - started_s) / _MEASURED_ROUNDS
            self._rounds = min(int(BUSY_S / per_round_s) + 1, _BUSY_ROUNDS_MAX)
        return self._rounds
