"""Direct capture and device outputs: two optional paths that change no byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotmirror.core.backend import Capabilities, Fence, Stream
from slotmirror.core.direct_capture import long_runs
from slotmirror.core.errors import CacheFailedError, NotSupported
from support.caches import Driver, firsts, rows
from support.gated_backend import GatedBackend, GatedFence


class PromptBackend(GatedBackend):
    """Asynchronous by declaration; copies run whenever somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.on_wait = lambda timeout_s: self.finish() if timeout_s else None
        self.scattered = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(async_copy=True, pinned_host=True, device_copies=True)

    def scatter_slots(self, pool, slots, source):  # type: ignore[no-untyped-def]
        self.scattered += len(slots)
        super().scatter_slots(pool, slots, source)

    def copy_to_device(self, source: torch.Tensor, stream: Stream) -> tuple[torch.Tensor, Fence]:
        target = torch.full_like(source, -1)
        fence = GatedFence(self)
        self.copy_to_host([(source, target)], stream, stream, fence)
        return target, fence


def capturing(rows_min: int | None) -> Driver:
    return Driver(
        backend=PromptBackend(),
        num_blocks=16,
        pin_pool=rows_min is not None,
        direct_capture_rows_min=rows_min,
    )


@pytest.mark.parametrize(
    ("slots", "rows_min", "runs", "rest"),
    [
        ([4, 5, 6, 7], 2, [(0, 4, 4)], []),
        ([4, 5, 6, 7], 5, [], [0, 1, 2, 3]),
        ([9, 2, 3, 4, 7, 8, 1], 2, [(1, 2, 3), (4, 7, 2)], [0, 6]),
        ([3, 2, 1], 1, [(0, 3, 1), (1, 2, 1), (2, 1, 1)], []),
        ([5], 2, [], [0]),
    ],
)
def test_runs_of_neighbouring_slots(
    slots: list[int], rows_min: int, runs: list[tuple[int, int, int]], rest: list[int]
) -> None:
    """Long runs as (row, slot, rows), everything else row by row."""
    found, others = long_runs(np.array(slots, dtype=np.int64), rows_min)
    assert found == runs
    assert others.tolist() == rest


@pytest.mark.parametrize("rows_min", [None, 1, 3, 4, 100])
def test_direct_capture_changes_no_byte(rows_min: int | None) -> None:
    """A prompt over scattered blocks, a decode, a hit: the same rows, whatever goes directly."""
    driver = capturing(rows_min)
    new = {"a": (0, (3, 4, 9)), "d": (0, (1,))}
    driver.start({"a": (0, 10), "d": (0, 1)}, new=new)
    driver.cache.materialize(driver.save(rows(0, 11), {"codes": rows(50, 11, 3)}))
    out = driver.run({"b": (8, 1)}, rows(70, 1), {}, new={"b": (8, (3, 4, 12))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 4, 5, 6, 7, 70]
    assert firsts(out.mm_outputs["codes"]["b"]) == [50, 51, 52, 53, 54, 55, 56, 57]
    driver.settle()
    captured = {None: 0, 1: 11 * 2 + 1, 3: 8 * 2, 4: 8 * 2, 100: 0}[rows_min]
    assert driver.cache.stats()["rows_captured_directly"] == captured
    assert driver.backend.scattered == 11 * 2 + 1 - captured  # type: ignore[attr-defined]
    driver.cache.shutdown()


@pytest.mark.parametrize(("counts", "kept"), [((4, 1), [4, 1, 2, 3]), ((1, 4), [1, 2, 3, 4])])
def test_H4_direct_capture_keeps_the_later_row_of_a_slot_written_twice(
    counts: tuple[int, int], kept: list[int]
) -> None:
    """A run's copy and the other rows' scatter have no order between them, but rows have."""
    driver = capturing(4)
    scheduled = {name: (0, count) for name, count in zip("ab", counts, strict=True)}
    driver.start(scheduled, new=dict.fromkeys("ab", (0, (0,))))
    driver.cache.materialize(driver.save(rows(0, 5)))
    driver.settle()
    out = driver.run({"c": (4, 1)}, rows(9, 1), new={"c": (4, (0, 1))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [*kept, 9]


def test_a_failed_direct_capture_is_sticky_and_frees_nothing_early() -> None:
    """The launch fails half-way: the page returns after the copies have run, the cause is kept."""
    driver = capturing(1)
    backend = driver.backend
    launch = backend.copy_to_host
    launches: list[int] = []

    def fail_second(pairs, stream, after, fence):  # type: ignore[no-untyped-def]
        launches.append(len(pairs))
        launch(pairs[:1], stream, after, fence)
        if len(launches) == 2:
            raise OSError("link down")

    backend.copy_to_host = fail_second  # type: ignore[method-assign]
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    step_id = driver.save(rows(0, 4))
    driver.settle()
    assert launches == [1, 1]
    with pytest.raises(CacheFailedError, match="link down"):
        driver.cache.materialize(step_id)
    driver.cache.shutdown()
    assert driver.cache.stats()["pages_held"] == 0


def test_outputs_on_the_device_are_the_same_rows_behind_one_fence() -> None:
    """Hit rows and new rows, sent to the device; leftovers stay; the fence is behind all keys."""
    driver = Driver(backend=PromptBackend(), pin_outputs=True, num_blocks=16)
    driver.run({"a": (0, 8)}, rows(0, 8), {"codes": rows(20, 8)}, new={"a": (0, (0, 1))})
    driver.start({"b": (8, 1)}, new={"b": (8, (0, 1, 2))})
    step_id = driver.save(rows(8, 1), {"codes": rows(28, 1), "ref": torch.arange(5)})
    out = driver.cache.materialize(step_id, device=True)
    assert out.arrival is not None
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [-1] * 9
    assert out.arrival.wait(1)
    assert firsts(out.hidden_states["b"]) == list(range(9))
    assert firsts(out.mm_outputs["codes"]["b"]) == list(range(20, 29))
    assert out.mm_outputs["ref"]["b"].tolist() == [0, 1, 2, 3, 4]
    driver.cache.shutdown()


def test_outputs_on_the_device_hold_their_source_until_the_copy_has_run() -> None:
    """The host buffer is not recycled under the copy, though nobody else holds it."""
    driver = Driver(backend=PromptBackend(), num_blocks=2048, block_size=4,
                    staging_capacity_tokens=4096)  # fmt: skip
    new = {"a": (0, range(1024))}
    driver.start({"a": (0, 4096)}, new=new)
    first = driver.cache.materialize(driver.save(rows(0, 4096, 8)), device=True)
    driver.start({"b": (0, 4096)}, new={"b": (0, range(1024, 2048))})
    driver.cache.materialize(driver.save(rows(9, 4096, 8)))
    assert first.arrival is not None
    assert first.arrival.wait(1)
    assert first.hidden_states is not None
    assert firsts(first.hidden_states["a"]) == list(range(4096))


def test_a_backend_without_device_copies_refuses_and_consumes_nothing() -> None:
    """`NotSupported`; the step is then delivered on the host."""
    driver = Driver()
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    step_id = driver.save(rows(0, 2))
    with pytest.raises(NotSupported, match="does not declare device_copies"):
        driver.cache.materialize(step_id, device=True)
    assert driver.cache.materialize(step_id).spans["a"] == (0, 2)


def test_S3_a_pool_that_an_abandoned_copy_may_still_write_is_not_closed() -> None:
    """The shutdown gives up on a stalled device: page and pool stay with the process."""
    backend = PromptBackend()
    driver = Driver(
        backend=backend, pin_pool=True, direct_capture_rows_min=2, device_wait_timeout_s=1
    )

    def pass_time(timeout_s: float) -> None:
        driver.runtime.now_s += timeout_s

    backend.on_wait = pass_time
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.save(rows(0, 4))
    key = driver.cache._keys.by_name.get("__hidden_states__")
    assert key is not None
    driver.cache.shutdown()
    driver.settle()
    assert backend.finished == 0
    assert driver.cache.stats()["pages_stranded"] == 1
    backend.finish()
    assert firsts(key.pool.tensor[:4]) == [0, 1, 2, 3]
