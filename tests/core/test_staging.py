"""S: pages, step ids, discards, shutdown."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slotmirror.adapters.block_tables import BlockTables
from slotmirror.core.config import PrefixCacheConfig
from slotmirror.core.errors import (
    CacheShutDownError,
    MissingRowsError,
    RequestNotInStepError,
    RowLayoutError,
    StepStateError,
    StepTooLargeError,
    UnknownStepError,
    WaitTimeoutError,
)
from slotmirror.core.events import AdmittedRequest
from slotmirror.core.manager import PrefixCacheManager
from slotmirror.core.oplog import Operation
from slotmirror.core.policy import ModelCachePolicy
from support.caches import Driver, firsts, rows
from support.gated_backend import GatedBackend


def begun(driver: Driver, name: str, block: int, hidden: torch.Tensor | None = None) -> int:
    """A saved, unconsumed step of one new request with 2 rows."""
    driver.start({name: (0, 2)}, new={name: (0, (block,))})
    return driver.save(rows(0, 2) if hidden is None else hidden)


def test_S1_every_unconsumed_step_holds_a_page() -> None:
    """`staging_depth` saves go through, the next waits, and names the unconsumed steps."""
    driver = Driver(staging_depth=2, staging_claim_timeout_s=7)
    ids = [begun(driver, name, block) for block, name in enumerate("ab")]
    driver.settle()
    driver.start({"c": (0, 1)}, new={"c": (0, (2,))})
    with pytest.raises(WaitTimeoutError, match=r"page .staging_depth 2: .* after 7 s; .*\[1, 2\]"):
        driver.save(rows(0, 1))
    driver.cache.materialize(ids[0])
    out = driver.cache.materialize(driver.save(rows(5, 1)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["c"]) == [5]
    assert driver.cache.stats()["page_waits"] == 1


def test_S1_a_write_holds_its_page_until_the_pool_has_the_rows() -> None:
    """Consumed but not yet written: the save waits, the mover writes, the save goes on."""
    driver = Driver(staging_depth=1)
    driver.cache.materialize(begun(driver, "a", 0))
    assert driver.cache.stats()["pages_held"] == 1
    begun(driver, "b", 1)
    assert driver.cache.stats()["page_waits"] == 1
    assert driver.cache.stats()["rows_written"] == 2


def test_S1_a_leftover_only_step_holds_a_page_too() -> None:
    """Its leftovers lie there until somebody takes them."""
    driver = Driver(policy=ModelCachePolicy(needs_full_hidden_states=False))
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    step_id = driver.save(None, {"ref": torch.arange(7)}, num_tokens_unpadded=2)
    assert driver.cache.stats()["pages_held"] == 1
    assert driver.cache.materialize(step_id).mm_outputs["ref"]["a"].tolist() == list(range(7))
    assert driver.cache.stats()["pages_held"] == 0


def test_S1_an_arena_that_grows_gives_its_former_memory_back() -> None:
    """Page-locked memory that nobody closes would stay locked for good."""
    driver = Driver(policy=ModelCachePolicy(needs_full_hidden_states=False), staging_depth=1)
    allocate, arenas = driver.backend.alloc_host, []

    def noted(*arguments: Any, **settings: Any) -> Any:
        arenas.append(allocate(*arguments, **settings))
        return arenas[-1]

    driver.backend.alloc_host = noted  # type: ignore[method-assign]
    for position, size in enumerate((10, 1000)):
        new = {} if position else {"a": (0, (0,))}
        driver.run({"a": (position, 1)}, None, {"x": torch.arange(size)}, new=new)
    former, present = arenas
    assert (former.reserved_bytes, driver.cache.memory_stats()["staging_bytes"]) == (
        0,
        present.reserved_bytes,
    )


def test_S1_a_step_larger_than_a_page_names_the_setting() -> None:
    """Refused before anything changes."""
    driver = Driver(staging_capacity_tokens=3)
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    with pytest.raises(StepTooLargeError, match="raise staging_capacity_tokens to at least 4"):
        driver.save(rows(0, 4))
    stats = driver.cache.stats()
    assert (stats["pages_held"], stats["pool_bytes_by_key"]) == (0, {})


def test_S2_step_ids_are_consumed_exactly_once() -> None:
    """Used up by materialize or by discard; unknown ids are told apart from used ones."""
    driver = Driver()
    first, second = begun(driver, "a", 0), begun(driver, "b", 1)
    driver.cache.materialize(first)
    driver.cache.discard_step(second)
    for consume in (driver.cache.materialize, driver.cache.discard_step):
        for used in (first, second):
            with pytest.raises(UnknownStepError, match=f"step id {used} was already consumed"):
                consume(used)
        with pytest.raises(UnknownStepError, match="step id 99 was never given out"):
            consume(99)


def test_S2_a_request_outside_the_step_raises_and_consumes_nothing() -> None:
    """The step is then delivered as if nothing had happened."""
    driver = Driver()
    step_id = begun(driver, "a", 0)
    with pytest.raises(RequestNotInStepError, match=r"no rows of \['z'\]"):
        driver.cache.materialize(step_id, ["a", "z"])
    out = driver.cache.materialize(step_id, ["a"])
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["a"]) == [0, 1]


def test_S2_one_consumer_per_step() -> None:
    """While one call waits for the step's copy, a second one is refused."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    step_id = begun(driver, "a", 0)
    refused: list[str] = []

    def second_call(_timeout_s: float) -> None:
        for call in (driver.cache.materialize, driver.cache.discard_step):
            with pytest.raises(StepStateError, match="one consumer per step") as caught:
                call(step_id)
            refused.append(str(caught.value))
        backend.finish()

    backend.on_wait = second_call
    driver.cache.materialize(step_id)
    assert len(refused) == 2


def test_S3_a_discard_frees_nothing_that_a_copy_still_uses() -> None:
    """The page of a discarded step is reused only once its copy has run."""
    backend = GatedBackend()
    driver = Driver(backend=backend, staging_depth=1)
    driver.cache.discard_step(begun(driver, "a", 0))
    assert driver.cache.stats()["pages_held"] == 1
    backend.on_wait = lambda _timeout_s: backend.finish()
    driver.settle()
    assert driver.cache.stats()["pages_held"] == 0
    assert driver.cache.stats()["rows_written"] == 2


def test_S3_a_discarded_leftover_only_step_waits_for_its_copy() -> None:
    """No write views the page, yet it is released through the log, behind the copy."""
    backend = GatedBackend()
    policy = ModelCachePolicy(needs_full_hidden_states=False)
    driver = Driver(backend=backend, policy=policy)
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    driver.cache.discard_step(driver.save(None, {"x": torch.arange(5)}, num_tokens_unpadded=2))
    waited: list[float] = []

    def finish(timeout_s: float) -> None:
        waited.append(timeout_s)
        assert driver.cache.stats()["pages_held"] == 1
        backend.finish()

    backend.on_wait = finish
    driver.settle()
    assert waited
    assert driver.cache.stats()["pages_held"] == 0


def test_S3_discarded_rows_stay_hittable() -> None:
    """A discard gives up a delivery, not the rows."""
    driver = Driver()
    driver.start({"a": (0, 4)}, new={"a": (0, (0,))})
    driver.cache.discard_step(driver.save(rows(0, 4)))
    out = driver.run({"b": (4, 1)}, rows(9, 1), new={"b": (4, (0, 1))})
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [0, 1, 2, 3, 9]


def test_S3_shutdown_finishes_what_is_in_flight_and_is_harmless_twice() -> None:
    """Queued writes are carried out, pages come back, every later call raises."""
    driver = Driver()
    step_id = begun(driver, "a", 0)
    cache = driver.cache
    cache.shutdown()
    cache.shutdown()
    assert cache.stats()["rows_written"] == 2
    assert cache.memory_stats()["pool_bytes"] == 0
    assert cache.memory_stats()["staging_bytes"] == 0
    for call in (
        lambda: cache.materialize(step_id),
        lambda: cache.discard_step(step_id),
        lambda: driver.save(rows(0, 1)),
        lambda: driver.start({}, ended=["a"]),
        lambda: cache.register_policy(ModelCachePolicy()),
        lambda: cache.preallocate([]),
        lambda: cache.quiesce(1),
        cache.reset,
    ):
        with pytest.raises(CacheShutDownError):
            call()


def test_S3_shutdown_never_frees_a_page_under_an_unfinished_copy() -> None:
    """The device never finishes: shutdown gives up, bounded, and leaves that page alone."""
    backend = GatedBackend()
    driver = Driver(backend=backend, device_wait_timeout_s=5, staging_depth=2)
    step_id = begun(driver, "a", 0)
    page = driver.cache._tables.steps._steps[step_id].page
    assert page is not None
    driver.runtime.actors.clear()  # nobody carries out the write: it waits for the device
    driver.cache.shutdown()
    assert page.reserved_bytes > 0
    assert driver.cache.memory_stats()["staging_bytes"] == page.reserved_bytes


def test_S3_a_consumer_that_fails_during_shutdown_gives_its_page_back() -> None:
    """Shutdown begins while a materialize waits for the device; that call then fails."""
    backend = GatedBackend()
    config = PrefixCacheConfig(num_blocks=8, block_size=4)
    cache = PrefixCacheManager(config, backend)
    cache.register_policy(ModelCachePolicy())
    cache.new_step_starts(
        BlockTables(num_blocks=8, block_size=4).step(
            new=[AdmittedRequest("bad", 4, (6, 1))],
            num_scheduled_tokens={"bad": 1},
            num_computed_tokens={"bad": 4},
        )
    )
    step_id = cache.save_outputs(rows(0, 1), {}, num_tokens_unpadded=1)
    waiting, closing = threading.Event(), threading.Event()
    refused: list[Exception] = []

    def wait_for_the_shutdown(_timeout_s: float) -> None:
        waiting.set()
        assert closing.wait(60)
        backend.finish()

    backend.on_wait = wait_for_the_shutdown
    close = cache._plane.close

    def announce_and_close(*arguments: Any) -> bool:
        closing.set()
        return close(*arguments)

    cache._plane.close = announce_and_close  # type: ignore[method-assign]

    def consume() -> None:
        try:
            cache.materialize(step_id)
        except MissingRowsError as error:
            refused.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waiting.wait(60)
    cache.shutdown()
    consumer.join(60)
    assert len(refused) == 1
    assert cache.stats()["pages_held"] == 0
    assert cache.memory_stats()["staging_bytes"] == 0
    with pytest.raises(CacheShutDownError):
        cache.materialize(step_id)


def test_S3_a_step_that_is_given_up_counts_as_busy_until_its_release_is_in_the_log() -> None:
    """A shutdown that looks in between must not close the ring before the page is back."""
    driver = Driver()
    step_id = begun(driver, "a", 0)
    cache, steps, log = driver.cache, driver.cache._tables.steps, driver.cache._plane.log
    append, busy = log.append, []

    def shut_down_meanwhile(*_: object) -> None:
        cache._tables.closed = True
        assert steps.take_idle() == []
        raise MemoryError

    def append_and_look(operations: Sequence[Operation]) -> None:
        append(operations)
        busy.append(steps.num_consuming)

    cache._plane.await_rows = shut_down_meanwhile  # type: ignore[method-assign]
    log.append = append_and_look  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        cache.materialize(step_id)
    assert busy == [1]
    assert steps.num_consuming == 0
    assert steps.ids() == []


def test_S3_quiesce_drains_the_log_and_is_bounded() -> None:
    """Afterwards every row is in the pool; with a stuck mover it raises, naming the head."""
    driver = Driver()
    begun(driver, "a", 0)
    driver.cache.quiesce(1)
    assert driver.cache.stats()["rows_written"] == 2
    driver.runtime.actors.clear()
    begun(driver, "b", 1)
    with pytest.raises(WaitTimeoutError, match="the log to drain after 2 s; the log is idle, 1 of"):
        driver.cache.quiesce(2)


@pytest.mark.parametrize(
    ("order", "count", "message"),
    [
        (["a"], 3, r"req_ids \['a'\] is not an order of the requests scheduled"),
        (["a", "b", "c"], 3, "is not an order of the requests"),
        (["a", "a"], 3, "is not an order of the requests"),
        (["b", "a", "b"], 3, "is not an order of the requests"),
        (None, 2, "num_tokens_unpadded=2, but this step's requests were scheduled for 3 tokens"),
    ],
)
def test_S4_row_orders_and_counts_that_do_not_fit_raise_first(
    order: list[str] | None, count: int, message: str
) -> None:
    """Refused before anything changed: the right save then works."""
    driver = Driver()
    driver.start({"a": (0, 2), "b": (0, 1)}, new={"a": (0, (0,)), "b": (0, (1,))})
    before = driver.cache.stats()
    with pytest.raises(RowLayoutError, match=message):
        driver.save(rows(0, count), req_ids=order)
    assert driver.cache.stats() == before
    out = driver.cache.materialize(driver.save(rows(0, 3)))
    assert out.hidden_states is not None
    assert firsts(out.hidden_states["b"]) == [2]


def test_S4_padding_below_the_token_count_raises() -> None:
    """`num_tokens_padded` must not be below `num_tokens_unpadded`."""
    driver = Driver()
    driver.start({"a": (0, 2)}, new={"a": (0, (0,))})
    with pytest.raises(RowLayoutError, match="num_tokens_padded=1 is below"):
        driver.save(rows(0, 2), num_tokens_padded=1)


def test_S4_slots_outside_the_pool_name_the_request() -> None:
    """A request whose table lacks the block it writes to is refused when the step starts."""
    driver = Driver()
    with pytest.raises(RowLayoutError, match=r"requests \['a'\] write slots \[-1\]"):
        driver.start({"a": (0, 5)}, new={"a": (0, (0,))})
    assert driver.cache.stats()["steps_started"] == 0
