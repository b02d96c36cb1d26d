"""The cuda backend over the stand-in, each time with one fault that a real backend could have."""

from __future__ import annotations

import dataclasses
import importlib
import os

import torch

from slotmirror.core.backend import Capabilities, Fence, Probe
from slotmirror.core.errors import NotSupported
from support.stand_in.backends import StandInCuda


class FenceOver(Fence):
    """A fence that passes everything on; faults are put in between."""

    def __init__(self, inner: Fence) -> None:
        self.inner = inner

    def record(self, stream):
        self.inner.record(stream)

    def wait_on(self, stream):
        self.inner.wait_on(stream)

    def done(self):
        return self.inner.done()

    def wait(self, timeout_s):
        return self.inner.wait(timeout_s)


class WithOwnCopies(StandInCuda):
    """The copy of the base in its three parts, so that a mutant can change one."""

    def copy_to_host(self, pairs, stream, after, fence):
        self.order(stream, after)
        with self._api.use_stream(stream):
            for source, destination in self.chosen(pairs):
                self.copy(source, destination)
        fence.record(stream)

    def order(self, stream, after):
        stream.wait_stream(after)

    def chosen(self, pairs):
        return pairs

    def copy(self, source, destination):
        destination.copy_(source.contiguous(), non_blocking=True)


class DoesNotWaitForTheEngine(WithOwnCopies):
    def order(self, stream, after):
        pass


class RecordsBeforeCopying(WithOwnCopies):
    def copy_to_host(self, pairs, stream, after, fence):
        stream.wait_stream(after)
        fence.record(stream)
        with self._api.use_stream(stream):
            for source, destination in pairs:
                self.copy(source, destination)


class RecordsOnTheEnginesStream(WithOwnCopies):
    def copy_to_host(self, pairs, stream, after, fence):
        unrecorded = self.new_fence()
        super().copy_to_host(pairs, stream, after, unrecorded)
        fence.record(after)


class CopiesTheFirstPairOnly(WithOwnCopies):
    def chosen(self, pairs):
        return pairs[:1]


class IgnoresStrides(WithOwnCopies):
    def copy(self, source, destination):
        flat = source.as_strided(destination.shape, destination.stride(), 0)
        destination.copy_(flat, non_blocking=True)


class FreesItsTemporaries(WithOwnCopies):
    """Makes contiguous copies on the engine's stream and keeps them no longer than the call."""

    def copy_to_host(self, pairs, stream, after, fence):
        ready = [(source.contiguous(), destination) for source, destination in pairs]
        super().copy_to_host(ready, stream, after, fence)


class DropsTheDtype(WithOwnCopies):
    def copy(self, source, destination):
        kind = torch.float32 if source.is_floating_point() else torch.int32
        rounded = source if source.is_complex() else source.to(kind).to(source.dtype)
        destination.copy_(rounded.contiguous(), non_blocking=True)


class WritesBesideTheDestination(WithOwnCopies):
    def copy(self, source, destination):
        end = destination.storage_offset() + destination.numel()
        if destination.untyped_storage().nbytes() > (end + 1) * destination.itemsize:
            destination.as_strided((1,), (1,), end).zero_()
        super().copy(source, destination)


class CopiesSynchronously(StandInCuda):
    def copy_to_host(self, pairs, stream, after, fence):
        super().copy_to_host(pairs, stream, after, fence)
        fence.wait(60.0)


class HidesItsAsynchrony(StandInCuda):
    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, async_copy=False)


class WaitsNever(StandInCuda):
    """A host read before the fence: the wait says at once that the bytes are there."""

    class _Fence(FenceOver):
        def wait(self, timeout_s):
            return True

        def done(self):
            return True

    def new_fence(self):
        return self._Fence(super().new_fence())

    def copy_to_host(self, pairs, stream, after, fence):
        super().copy_to_host(pairs, stream, after, fence.inner)


class WaitsWithoutBound(StandInCuda):
    class _Fence(FenceOver):
        def wait(self, timeout_s):
            while not self.inner.done():
                pass
            return True

    def new_fence(self):
        return self._Fence(super().new_fence())

    def copy_to_host(self, pairs, stream, after, fence):
        super().copy_to_host(pairs, stream, after, fence.inner)


class ReusesOneEvent(StandInCuda):
    """Every fence is the same event, recorded again before it was reached."""

    _shared: object = None

    def new_fence(self):
        if self._shared is None:
            self._shared = self._api.new_event(self.device)
        fence = super().new_fence()
        fence._event = self._shared
        return fence


class RecordsOnce(StandInCuda):
    class _Fence(FenceOver):
        recorded = False

        def record(self, stream):
            if not self.recorded:
                self.inner.record(stream)
            self.recorded = True

    def new_fence(self):
        return self._Fence(super().new_fence())

    def copy_to_host(self, pairs, stream, after, fence):
        super().copy_to_host(pairs, stream, after, self._new_fence())
        fence.record(stream)


class NeverHoldsAStreamBack(StandInCuda):
    def new_fence(self):
        fence = super().new_fence()
        fence.wait_on = lambda stream: None
        return fence


class BindsNothing(StandInCuda):
    def bind_thread(self, device):
        pass


class SnapshotsAreTheOriginals(StandInCuda):
    def snapshot(self, tensors):
        return list(tensors)


class SnapshotsKeepStrides(StandInCuda):
    def snapshot(self, tensors):
        copies = []
        for tensor in tensors:
            wide = torch.empty_like(
                torch.empty((*tensor.shape, 2), dtype=tensor.dtype), device=self.device
            )
            wide[..., 0].copy_(tensor)
            copies.append(wide[..., 0])
        return copies


class OwnsEverything(StandInCuda):
    def owns(self, tensor):
        return True


class ClaimsDeviceCopies(StandInCuda):
    def copy_to_device(self, source, stream):
        raise NotSupported("not after all")


class HidesDeviceCopies(StandInCuda):
    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, device_copies=False)


class RecordsBeforeCopyingToTheDevice(StandInCuda):
    def copy_to_device(self, source, stream):
        fence = self.new_fence()
        fence.record(stream)
        tensor, _ = super().copy_to_device(source, stream)
        return tensor, fence


class SpeaksAnotherVersion(StandInCuda):
    api_version = 2


class ChangesItsCapabilities(StandInCuda):
    _asked = 0

    @property
    def capabilities(self) -> Capabilities:
        self._asked += 1
        return dataclasses.replace(super().capabilities, max_pinned_bytes=self._asked)


class ProbeChangesTheEnvironment(StandInCuda):
    @classmethod
    def probe(cls) -> Probe:
        os.environ["VENDOR_RUNTIME_LOADED"] = "1"
        return super().probe()


class ProbeImportsARuntime(StandInCuda):
    @classmethod
    def probe(cls) -> Probe:
        importlib.import_module("xmlrpc.client")  # stands for a vendor's runtime
        return super().probe()


class ProbeRaises(StandInCuda):
    @classmethod
    def probe(cls) -> Probe:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            raise RuntimeError("no device")
        return super().probe()


class ProbeGivesNoReason(StandInCuda):
    @classmethod
    def probe(cls) -> Probe:
        return dataclasses.replace(super().probe(), reason="")
