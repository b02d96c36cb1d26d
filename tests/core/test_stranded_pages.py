"""A launch fails and has no fence behind it: the page is let go only when that is safe."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence

import pytest
import torch

from slotmirror.core.backend import Fence, Stream
from slotmirror.core.errors import CacheFailedError
from slotmirror.core.policy import ModelCachePolicy
from slotmirror.core.staging import StagingPage
from support.caches import Driver, rows
from support.gated_backend import GatedBackend, GatedFence


class _RefusingFence(GatedFence):
    """Refuses to be recorded as often as its backend says."""

    def record(self, stream: Stream) -> None:
        backend = self._backend
        assert isinstance(backend, _HalfLaunchingBackend)
        if backend.refusals_left:
            backend.refusals_left -= 1
            raise OSError("no fence")
        super().record(stream)


class _HalfLaunchingBackend(GatedBackend):
    """Its launches leave a copy under way and, with `fails`, raise; `lost_for_certain` answers
    `is_lost`.
    """

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals_left = refusals
        self.fails = True
        self.lost_for_certain = False

    def new_fence(self) -> Fence:
        return _RefusingFence(self)

    def copy_to_host(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        stream: Stream,
        after: Stream,
        fence: Fence,
    ) -> None:
        super().copy_to_host(pairs, stream, after, fence)
        if self.fails:
            raise OSError("the launch failed")

    def is_lost(self) -> bool:
        return self.lost_for_certain


def failed_save(refusals: int) -> tuple[Driver, _HalfLaunchingBackend]:
    """A driver whose only save failed at its launch, with the mover yet to act."""
    backend = _HalfLaunchingBackend(refusals)
    driver = Driver(backend=backend)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(CacheFailedError, match="no fence"):
        driver.save(rows(0, 2))
    return driver, backend


def pages(driver: Driver) -> tuple[object, object, int]:
    """Pages held, pages stranded, bytes stranded."""
    stats = driver.cache.stats()
    stranded = driver.cache.memory_stats()["stranded_bytes"]
    return stats["pages_held"], stats["pages_stranded"], stranded


def test_W5_the_mover_places_the_fence_that_the_launch_could_not() -> None:
    """The page is held until the copy has run, and is then free like any other."""
    driver, backend = failed_save(refusals=1)
    backend.on_wait = lambda timeout_s: backend.finish()
    assert pages(driver) == (1, 0, 0)
    driver.settle()
    assert backend.finished == 1
    assert pages(driver) == (0, 0, 0)
    driver.cache.shutdown()
    assert sum(driver.cache.memory_stats().values()) == 0


def test_W5_a_page_without_a_fence_is_stranded_and_counted() -> None:
    """Nobody can tell when it is quiet: it leaves the ring, its bytes are reported apart."""
    driver, _ = failed_save(refusals=2)
    driver.settle()
    held, stranded, num_bytes = pages(driver)
    assert (held, stranded) == (0, 1)
    assert num_bytes == 64 * 2 * 4
    driver.cache.shutdown()
    assert driver.cache.memory_stats()["stranded_bytes"] == num_bytes
    assert sum(driver.cache.memory_stats().values()) == num_bytes


def page_references(driver: Driver) -> list[weakref.ref[StagingPage]]:
    """References to all pages; the first one claimed is the first."""
    return [weakref.ref(page) for page in driver.cache._plane.ring.pages]


def test_W5_a_stranded_page_outlives_its_cache() -> None:
    """The copy may come as late as it likes: it finds the memory as it was."""
    driver, _ = failed_save(refusals=2)
    driver.settle()
    stranded, *others = page_references(driver)
    del driver, _
    gc.collect()
    assert stranded() is not None
    assert all(page() is None for page in others)


def test_W5_a_page_whose_copies_have_ended_goes_with_its_cache() -> None:
    """Nothing remembers it, although copies ran into it, one of which failed."""
    backend = GatedBackend()
    backend.on_wait = lambda timeout_s: backend.finish()
    driver = Driver(backend=backend)
    driver.run({"a": (0, 2)}, rows(0, 2), new={"a": (0, (0,))})
    driver.settle()
    driver.start({"a": (2, 1)})
    driver.save(rows(2, 1))
    backend.lost = OSError("gone")
    driver.settle()
    pages = page_references(driver)
    del driver
    gc.collect()
    assert [page() for page in pages] == [None] * len(pages)


def test_S3_a_page_that_a_shutdown_left_to_its_copy_outlives_its_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The device never finished, nobody has let go of the page, and the cache is gone."""
    # A captured report keeps its error, and with it everything.
    caplog.set_level(logging.CRITICAL, logger="slotmirror.core")
    driver = Driver(backend=GatedBackend(), device_wait_timeout_s=5)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    driver.save(rows(0, 2))
    driver.runtime.actors.clear()  # nobody carries out the write
    held, *others = page_references(driver)
    driver.cache.shutdown()
    del driver
    gc.collect()
    assert held() is not None
    assert all(page() is None for page in others)


def test_W5_a_device_that_is_lost_for_certain_strands_nothing() -> None:
    """None of its copies will ever run, so the page is free at once."""
    driver, backend = failed_save(refusals=2)
    backend.lost_for_certain = True
    driver.settle()
    assert pages(driver) == (0, 0, 0)
    driver.cache.shutdown()
    assert sum(driver.cache.memory_stats().values()) == 0


def failed_deferred_write(refusals: int) -> tuple[Driver, list[weakref.ref[torch.Tensor]]]:
    """A driver whose first deferred write failed at its launch, and the clones that it reads."""
    backend = _HalfLaunchingBackend(0)
    backend.fails = False
    backend.on_wait = lambda timeout_s: backend.finish()
    policy = ModelCachePolicy(needs_full_hidden_states=False, deferred_keys=frozenset({"codes"}))
    driver = Driver(backend=backend, policy=policy)
    clones: list[weakref.ref[torch.Tensor]] = []
    snapshot = backend.snapshot

    def watched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = snapshot(tensors)
        clones.extend(weakref.ref(clone) for clone in made)
        return made

    backend.snapshot = watched  # type: ignore[method-assign]
    driver.run({"a": (0, 2)}, None, {"codes": rows(0, 2)}, new={"a": (0, (0,))})
    backend.fails, backend.refusals_left = True, refusals
    driver.start({}, ended=["a"])
    driver.settle()
    return driver, clones


@pytest.mark.parametrize(("refusals", "kept"), [(1, False), (2, True)])
def test_W5_clones_of_a_deferred_write_without_a_fence_are_kept(refusals: int, kept: bool) -> None:
    """With the bytes reserved for them, and for good, unless the mover can place the fence."""
    driver, clones = failed_deferred_write(refusals)
    assert driver.cache.memory_stats()["deferred_device_bytes"] == (16 if kept else 0)
    driver.cache.shutdown()
    assert driver.cache.memory_stats()["bounce_bytes"] == ((16 << 20) if kept else 0)
    del driver
    gc.collect()
    assert [clone() is not None for clone in clones] == [kept]
