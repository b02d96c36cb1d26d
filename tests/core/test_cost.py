"""P1, P3: a step's cost does not grow with its requests; rows are moved as rarely as possible."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch

from slotmirror.core.events import StepEvents
from support.caches import Driver, rows


def calls_of_a_decode_step(requests: int, *, hit: bool = False) -> int:
    """Python and C calls of `new_step_starts` and `save_outputs` in a steady decode step."""
    driver = Driver(num_blocks=4 * requests + 8, staging_capacity_tokens=4 * requests)
    names = [f"r{i}" for i in range(requests)]
    new = {name: (0, (4 * i, 4 * i + 1)) for i, name in enumerate(names)}
    hidden = rows(0, requests)
    driver.run(dict.fromkeys(names, (0, 1)), hidden, new=new)
    driver.run(dict.fromkeys(names, (1, 1)), hidden)
    driver.settle()
    events: StepEvents = driver.tables.step(
        num_scheduled_tokens=dict.fromkeys(names, 1), num_computed_tokens=dict.fromkeys(names, 2)
    )
    counted: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        counted[event] += 1

    sys.setprofile(count)
    try:
        driver.cache.new_step_starts(events)
        step_id = driver.cache.save_outputs(hidden, {}, num_tokens_unpadded=requests)
    finally:
        sys.setprofile(None)
    driver.cache.discard_step(step_id)
    return counted["call"] + counted["c_call"]


@pytest.mark.parametrize("requests", [32, 256])
def test_P1_the_number_of_calls_does_not_depend_on_the_number_of_requests(requests: int) -> None:
    """A fixed count of calls per step in the core, whatever the batch."""
    assert calls_of_a_decode_step(requests) == calls_of_a_decode_step(2)


def test_P3_rows_cross_host_memory_as_few_times_as_possible() -> None:
    """Computed: device → page, page → pool, page → output; hit: pool → output; once each."""
    driver = Driver(num_blocks=32)
    driver.run({"a": (0, 8)}, rows(0, 8), new={"a": (0, (0, 1))})
    driver.settle()
    moved: Counter[str] = Counter()
    backend = driver.backend
    scatter, gather, copy = backend.scatter_slots, backend.gather_slots, backend.copy_to_host

    def counting_scatter(pool, slots, source):  # type: ignore[no-untyped-def]
        moved["page → pool"] += len(slots)
        scatter(pool, slots, source)

    def counting_gather(pool, slots, out):  # type: ignore[no-untyped-def]
        moved["pool → output"] += len(slots)
        gather(pool, slots, out)

    def counting_copy(pairs, stream, after, fence):  # type: ignore[no-untyped-def]
        moved["device → page"] += sum(len(source) for source, _ in pairs)
        copy(pairs, stream, after, fence)

    backend.scatter_slots = counting_scatter  # type: ignore[method-assign]
    backend.gather_slots = counting_gather  # type: ignore[method-assign]
    backend.copy_to_host = counting_copy  # type: ignore[method-assign]
    out = driver.run(
        {"b": (8, 2), "c": (0, 3)}, rows(10, 5), new={"b": (8, (0, 1, 2)), "c": (0, (3,))}
    )
    driver.settle()
    # The one gather of all hits spans their regions, so b's 2 computed rows are among its 10.
    assert moved == {"device → page": 5, "page → pool": 5, "pool → output": 8 + 2}
    assert out.hidden_states is not None
    merged = out.hidden_states["b"]
    assert torch.equal(merged[:, 0], torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 10, 11]))
