"""O1: what the log says of itself."""

from __future__ import annotations

from support.caches import Driver, rows
from support.faults import begun
from support.gated_backend import GatedBackend


def saved(driver: Driver, number: int) -> int:
    """A step of one new request, saved; its write waits for the mover."""
    name = f"r{number}"
    block = number % 8
    driver.start({name: (0, 1)}, new={name: (0, (block,))}, ended=[f"r{number - 1}"])
    return driver.save(rows(number, 1))


def test_O1_the_logs_age_counts_from_its_last_progress() -> None:
    """What is appended later does not make a log look younger that stands still."""
    driver = Driver()
    assert driver.cache.stats()["log_age_s"] == 0.0
    saved(driver, 1)
    driver.runtime.now_s = 5.0
    saved(driver, 2)
    driver.runtime.now_s = 7.0
    stats = driver.cache.stats()
    assert (stats["log_length"], stats["log_age_s"]) == (2, 7.0)
    driver.settle()
    driver.runtime.now_s = 20.0
    assert driver.cache.stats()["log_age_s"] == 0.0


def test_O1_a_log_that_was_idle_is_young() -> None:
    """Its age is that of its oldest operation, not of the last work before it."""
    driver = Driver()
    saved(driver, 1)
    driver.settle()
    driver.runtime.now_s = 50.0
    saved(driver, 2)
    driver.runtime.now_s = 53.0
    assert driver.cache.stats()["log_age_s"] == 3.0


def test_O1_the_logs_tail_is_bounded_and_ends_with_the_newest() -> None:
    """However long a cache has served."""
    driver = Driver()
    for number in range(200):
        driver.cache.discard_step(saved(driver, number))
        driver.settle()
    tail = driver.cache.log_tail()
    numbers = [int(line.split()[0]) for line in tail]
    assert len(tail) == 64
    assert tail[-1].endswith("of step 200")
    assert numbers == list(range(numbers[0], numbers[0] + 64))


def test_O1_only_copies_that_were_waited_for_count_as_fence_waits() -> None:
    """The mover comes once when the copy has run, and once before it has."""
    backend = GatedBackend()
    driver = Driver(backend=backend)
    begun(driver, "a", 0)
    backend.finish()
    driver.settle()
    assert driver.cache.stats()["fence_waits"] == 0
    backend.on_wait = lambda _timeout_s: backend.finish()
    begun(driver, "b", 1)
    driver.settle()
    assert driver.cache.stats()["fence_waits"] == 1
