"""A slotmirror backend: host memory as the device, and a thread as its copy engine.

Copies run while the engine goes on, so that all of the cache's asynchronous side is at work, on
any machine. Streams are queues with one worker each, fences are futures in them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import torch

from slotmirror.core.backend import Capabilities, DeviceBackend, Fence, HostBuffer, Probe, Stream


class CopyStream:
    """A queue of copies and the thread that runs them, in order."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "threadcopy")
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], object]) -> Future[None]:
        """Queue `work`. The future fails with the first error of the queue so far."""
        return self._worker.submit(self._run, work)

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._error


class CopyFence(Fence):
    """Reached when the worker gets to where it was recorded."""

    def __init__(self) -> None:
        self._reached: Future[None] | None = None

    def record(self, stream: Stream) -> None:
        # The engine's own stream is the calling thread: what it has computed is there already.
        self._reached = stream.submit(int) if isinstance(stream, CopyStream) else None

    def wait_on(self, stream: Stream) -> None:
        if self._reached is not None and isinstance(stream, CopyStream):
            stream.submit(self._reached.result)

    def done(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        try:
            return self._reached is None or self._reached.result(timeout_s) is None
        except FutureTimeoutError:
            return False


class OrdinaryBuffer(HostBuffer):
    """Ordinary memory: nothing has to be page-locked for a thread."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self.pinned = False
        self.reserved_bytes = self.tensor.nbytes

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=self.tensor.dtype, device="cpu")


class ThreadCopyBackend(DeviceBackend):
    """See the module's text."""

    name = "threadcopy"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "needs a thread, nothing else", ("cpu",), {"torch": torch.__version__})

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(async_copy=True, pinned_host=False)

    def bind_thread(self, device: torch.device) -> None:
        """Every thread may use host memory."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def current_stream(self) -> Stream:
        return None

    def new_stream(self) -> Stream:
        return CopyStream()

    def new_fence(self) -> Fence:
        return CopyFence()

    def alloc_host(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        return OrdinaryBuffer(shape, dtype)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def copy_to_host(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        if not isinstance(stream, CopyStream):
            raise TypeError(f"{stream!r} is no stream of this backend")
        if isinstance(after, CopyStream):
            stream.submit(after.submit(int).result)
        for source, destination in pairs:
            stream.submit(partial(destination.copy_, source.detach()))
        fence.record(stream)
