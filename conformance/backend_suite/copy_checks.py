"""Copies and snapshots: what arrives, in which order, and when."""

from __future__ import annotations

import torch

from slotmirror.conformance.backend_suite.check import (
    checks_of,
    require,
    require_bytes,
)
from slotmirror.conformance.backend_suite.landing import GUARD_ROWS, POISON, Landing, fetched
from slotmirror.conformance.backend_suite.values import DTYPES, random_rows
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench

_ROWS = 64
_ROUNDS = 4
"""Of checks that a lucky order of the device's work could pass."""


def every_pair_arrives_whole(bench: Workbench) -> None:
    """Several tensors of one call, of every dtype, byte for byte."""
    values = [random_rows((_ROWS, 5 + i), dtype, seed=i) for i, dtype in enumerate(DTYPES)]
    sources = [bench.tensor(value) for value in values]
    landing = Landing(bench, sources)
    landing.launch(sources)
    for value, landed in zip(values, landing.wait(), strict=True):
        require_bytes(landed, value, f"a copy of {value.dtype}")


def strided_sources_arrive_in_order(bench: Workbench) -> None:
    """Sources may be strided: columns, transposes, every second row."""
    whole = random_rows((_ROWS, 12), torch.float32, seed=20)
    device = bench.tensor(whole)
    for first in range(_ROUNDS):
        views = [
            (device[:, first : first + 4], whole[:, first : first + 4]),
            (device.t(), whole.t()),
            (device[first::2], whole[first::2]),
        ]
        sources, values = [d for d, _ in views], [v.contiguous() for _, v in views]
        landing = Landing(bench, sources)
        with bench.busy():
            landing.launch(sources)
        # New device memory in the meantime must not be that of the copies' own temporaries.
        others = [bench.tensor(torch.full((_ROWS, 12), -1.0)) for _ in range(8)]
        for value, landed in zip(values, landing.wait(), strict=True):
            require_bytes(landed, value, "a copy of a strided tensor")
        del others


def rows_beside_the_destination_stay(bench: Workbench) -> None:
    """A destination may be the first rows of a larger buffer; the others keep their bytes."""
    values = random_rows((_ROWS, 3), torch.int16, seed=21)
    padded = torch.zeros((_ROWS + GUARD_ROWS, 3), dtype=torch.int16)
    source, landing = bench.tensor(values), Landing(bench, [padded])
    target = landing.tensors[0]
    backend = bench.backend
    backend.copy_to_host(
        [(source, target[:_ROWS])], landing.stream, backend.current_stream(), landing.fence
    )
    landed = landing.wait()[0]
    require_bytes(landed[:_ROWS], values, "a copy into the first rows")
    beside = landed[_ROWS:].contiguous().view(torch.uint8)
    require(bool((beside == POISON).all()), "a copy wrote beside its destination")


def copies_wait_for_the_engines_stream(bench: Workbench) -> None:
    """What the engine computes before the launch is what arrives."""
    values = random_rows((_ROWS, 8), torch.int64, seed=22)
    source, staged = bench.tensor(torch.zeros_like(values)), bench.tensor(values)
    landing = Landing(bench, [source])
    with bench.busy():
        bench.write(source, staged)
        landing.launch([source])
    require_bytes(landing.wait()[0], values, "a copy behind a busy engine")


def bytes_have_arrived_when_the_fence_is_reached(bench: Workbench) -> None:
    """The fence is behind the copies, not before them: read at once, they are whole."""
    large = random_rows((_ROWS, 1 << 16), torch.int64, seed=23)  # 32 MiB: milliseconds of copying
    small = [random_rows((64,), torch.int64, seed=100 + number) for number in range(_ROWS)]
    values = [large, *small]
    sources = [bench.tensor(value) for value in values]
    landing = Landing(bench, sources)
    with bench.busy():
        landing.launch(sources)
    for value, landed in zip(values, landing.wait(), strict=True):
        require_bytes(landed, value, "a copy, read when its fence was reached")


def an_asynchronous_copy_returns_before_its_bytes(bench: Workbench) -> None:
    """Declared `async_copy`: the launch returns while the copy waits. Else: it is over then."""
    values = random_rows((_ROWS, 8), torch.int64, seed=24)
    source = bench.tensor(values)
    landing = Landing(bench, [source])
    if not bench.backend.capabilities.async_copy:
        landing.launch([source])
        require(landing.fence.done(), "async_copy is not declared, but the copy is not over")
    elif bench.can_be_busy:
        with bench.busy():
            landing.launch([source])
            reached = landing.fence.done()
        require(not reached, "async_copy is declared, but the launch waited for the copy")
    else:
        landing.launch([source])
    require_bytes(landing.wait()[0], values, "a copy")


def snapshots_survive_the_next_forward(bench: Workbench) -> None:
    """The engine overwrites its buffers right after `snapshot`; the snapshot has the old bytes."""
    values = random_rows((_ROWS, 6), torch.bfloat16, seed=25)
    buffer = bench.tensor(values)
    junk = bench.tensor(random_rows((_ROWS, 6), torch.bfloat16, seed=26))
    before, after = Landing(bench, [buffer]), Landing(bench, [buffer])
    with bench.busy():
        snapshots = bench.backend.snapshot([buffer])
        before.launch(snapshots)
        bench.write(buffer, junk)
        after.launch(snapshots)
    require_bytes(before.wait()[0], values, "a snapshot whose original is overwritten meanwhile")
    require_bytes(after.wait()[0], values, "a snapshot whose original was overwritten before")


def snapshots_are_contiguous_device_copies(bench: Workbench) -> None:
    """Same shape, dtype and bytes, own device memory, contiguous."""
    values = random_rows((_ROWS, 10), torch.float16, seed=27)
    original = bench.tensor(values)
    views = [original, original[:, 2:5], original.t()]
    for view, copy in zip(views, bench.backend.snapshot(views), strict=True):
        require(copy.is_contiguous(), "a snapshot is not contiguous")
        require(bench.backend.owns(copy), "a snapshot does not lie on the device")
        require(copy.data_ptr() != original.data_ptr(), "a snapshot shares its original's memory")
        expected = values.as_strided(view.shape, view.stride(), view.storage_offset())
        require_bytes(fetched(bench, copy), expected.contiguous(), "a snapshot")


def only_device_tensors_are_owned(bench: Workbench) -> None:
    """`owns` is true of device tensors and their views, and false of others' tensors."""
    backend = bench.backend
    tensor = bench.tensor(torch.zeros(8, 4))
    require(backend.owns(tensor), "a device tensor is not owned")
    require(backend.owns(tensor[2:, 1:]), "a view of a device tensor is not owned")
    if bench.can_be_busy:
        require(not backend.owns(torch.zeros(8, 4)), "a host tensor is owned")
    require(not backend.owns(torch.zeros(8, 4, device="meta")), "a meta tensor is owned")


def rows_come_back_to_the_device(bench: Workbench) -> None:
    """Declared `device_copies`: a stream that waits for the fence sees the host's bytes."""
    backend = bench.backend
    if not backend.capabilities.device_copies:
        return  # undeclared: it must raise, and has a check of its own
    stream = backend.new_stream()
    for number in range(_ROUNDS):
        values = random_rows((_ROWS, 8), torch.int32, seed=130 + number)
        source = backend.alloc_host(
            values.shape, values.dtype, pinned=backend.capabilities.pinned_host
        )
        source.tensor.copy_(values)
        with bench.busy():
            tensor, fence = backend.copy_to_device(source.tensor, stream)
            fence.wait_on(backend.current_stream())
            copy = backend.snapshot([tensor])[0]
        require(backend.owns(tensor), "copy_to_device returned a tensor of another device")
        require_bytes(fetched(bench, copy), values, "rows copied to the device and back")
        require(fence.wait(WAIT_S), "the fence behind a copy to the device is never reached")
        source.close()


COPY_CHECKS = checks_of(
    every_pair_arrives_whole,
    strided_sources_arrive_in_order,
    rows_beside_the_destination_stay,
    copies_wait_for_the_engines_stream,
    bytes_have_arrived_when_the_fence_is_reached,
    an_asynchronous_copy_returns_before_its_bytes,
    snapshots_survive_the_next_forward,
    snapshots_are_contiguous_device_copies,
    only_device_tensors_are_owned,
    rows_come_back_to_the_device,
)
