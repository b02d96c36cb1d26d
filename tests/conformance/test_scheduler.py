"""The explorer's scheduler: one actor at a time, rules of locks, deadlocks, seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slotmirror.conformance.explorer.choices import BoundedChoices, SeededChoices
from slotmirror.conformance.explorer.runtime import ExploredRuntime
from slotmirror.conformance.explorer.scheduler import ScheduleError, Scheduler


class World:
    """A scheduler, its runtime, and a diary that actors write."""

    def __init__(self, seed: int = 0, points_max: int = 10_000) -> None:
        self.scheduler = Scheduler(SeededChoices(seed), points_max)
        self.runtime = ExploredRuntime(self.scheduler)
        self.diary: list[str] = []

    def play(self, *targets: Callable[[], None]) -> None:
        for number, target in enumerate(targets):
            self.scheduler.spawn(f"actor {number}", target)
        self.scheduler.run()


def test_exactly_one_actor_runs_between_two_points() -> None:
    """A read and a write with no point between them are never torn apart, in any of 50 runs."""
    for seed in range(50):
        world = World(seed)
        counter = [0]

        def count(world: World = world, counter: list[int] = counter) -> None:
            for _ in range(20):
                value = counter[0]
                counter[0] = value + 1
                world.scheduler.point()

        world.play(count, count, count)
        assert counter == [60]


def test_a_point_between_read_and_write_loses_updates_in_some_run() -> None:
    """The scheduler finds the race that the test above does not have."""
    totals = set()
    for seed in range(20):
        world = World(seed)
        counter = [0]

        def count(world: World = world, counter: list[int] = counter) -> None:
            for _ in range(5):
                value = counter[0]
                world.scheduler.point()
                counter[0] = value + 1

        world.play(count, count)
        totals.add(counter[0])
    assert min(totals) < 10
    assert len(totals) > 3


def test_a_seed_is_one_run() -> None:
    """The same seed gives the same diary; other seeds give others."""

    def diary(seed: int) -> list[str]:
        world = World(seed)

        def write(name: str) -> Callable[[], None]:
            def actor() -> None:
                for _ in range(5):
                    world.diary.append(name)
                    world.scheduler.point()

            return actor

        world.play(write("a"), write("b"), write("c"))
        return world.diary

    assert diary(7) == diary(7)
    assert len({tuple(diary(seed)) for seed in range(10)}) > 5


def test_a_lock_excludes() -> None:
    """Points inside the critical section do not let another in."""
    for seed in range(30):
        world = World(seed)
        lock = world.runtime.lock("log")
        inside: list[int] = []

        def enter(world: World = world, lock: object = lock, inside: list[int] = inside) -> None:
            for _ in range(5):
                with lock:  # type: ignore[attr-defined]
                    inside.append(1)
                    assert len(inside) == 1
                    world.scheduler.point()
                    inside.pop()

        world.play(enter, enter)


def test_a_notified_waiter_wakes_with_the_lock() -> None:
    """The consumer sees every item, whatever the order of waits and notifications."""
    for seed in range(30):
        world = World(seed)
        condition = world.runtime.condition(world.runtime.lock("log"))
        queue: list[int] = []
        seen: list[int] = []

        def consume(
            condition: object = condition, queue: list[int] = queue, seen: list[int] = seen
        ) -> None:
            while len(seen) < 5:
                with condition:  # type: ignore[attr-defined]
                    while not queue:
                        condition.wait()  # type: ignore[attr-defined]
                    seen.append(queue.pop(0))

        def produce(condition: object = condition, queue: list[int] = queue) -> None:
            for number in range(5):
                with condition:  # type: ignore[attr-defined]
                    queue.append(number)
                    condition.notify_all()  # type: ignore[attr-defined]

        world.play(consume, produce)
        assert seen == [0, 1, 2, 3, 4]


def test_the_clock_moves_only_when_nobody_can_run() -> None:
    """A time-out of an hour takes no time, and comes after all that could happen before."""
    world = World()
    condition = world.runtime.condition(world.runtime.lock("log"))

    def wait() -> None:
        with condition:
            assert not condition.wait(3600.0)
        world.diary.append(f"timed out at {world.runtime.monotonic()}")

    def work() -> None:
        for _ in range(50):
            world.scheduler.point()
        world.diary.append(f"worked until {world.runtime.monotonic()}")

    world.play(wait, work)
    assert world.diary == ["worked until 0.0", "timed out at 3600.0"]


def test_a_deadlock_is_reported_with_who_waits_for_what() -> None:
    """Two actors wait for notices that nobody will give."""
    world = World()
    condition = world.runtime.condition(world.runtime.lock("log"))

    def wait() -> None:
        with condition:
            condition.wait()

    with pytest.raises(ScheduleError, match=r"deadlock:\n.*actor 0 waits for a notice") as caught:
        world.play(wait, wait)
    assert "actor 1 waits for a notice under the log lock" in str(caught.value)


def test_a_run_without_end_is_ended() -> None:
    """So is one that is busy for ever."""
    world = World(points_max=500)

    def spin() -> None:
        while True:
            world.scheduler.point()

    with pytest.raises(ScheduleError, match="no end after 501 points"):
        world.play(spin, spin)


def breaks_order(world: World) -> None:
    with world.runtime.lock("log"), world.runtime.lock("manager"):
        pass


def takes_twice(world: World) -> None:
    lock = world.runtime.lock("task")
    with lock, lock:
        pass


def waits_under_two(world: World) -> None:
    condition = world.runtime.condition(world.runtime.lock("log"))
    with world.runtime.lock("manager"), condition:
        condition.wait(1.0)


def starts_under_a_lock(world: World) -> None:
    with world.runtime.lock("log"):
        world.runtime.start_thread("child", lambda: None)


def notifies_without(world: World) -> None:
    world.runtime.condition(world.runtime.lock("log")).notify_all()


@pytest.mark.parametrize(
    ("breach", "says"),
    [
        (breaks_order, r"takes the manager lock inside \['log'\]"),
        (takes_twice, r"takes the task lock inside \['task'\]"),
        (waits_under_two, r"waits on a log condition holding \['manager', 'log'\]"),
        (starts_under_a_lock, r"calls start_thread holding \['log'\]"),
        (notifies_without, "a notification without the lock"),
    ],
)
def test_the_rules_of_locks_are_kept(breach: Callable[[World], None], says: str) -> None:
    """T4, T5: each breach ends the run and names the actor's locks."""
    world = World()
    with pytest.raises(ScheduleError, match=says):
        world.play(lambda: breach(world))


def test_a_failing_actor_ends_the_others() -> None:
    """Whatever they wait for they are unwound, cleanups included, and the first error is raised."""
    world = World()
    condition = world.runtime.condition(world.runtime.lock("log"))

    def wait() -> None:
        try:
            with condition:
                condition.wait()
        finally:
            world.diary.append("unwound")

    def fail() -> None:
        for _ in range(10):
            world.scheduler.point()
        raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        world.play(wait, fail, wait)
    assert world.diary == ["unwound", "unwound"] or world.diary == ["unwound"]


def test_a_joined_thread_has_ended() -> None:
    """`join` waits for it, `is_alive` tells."""
    world = World()

    def parent() -> None:
        thread = world.runtime.start_thread("child", lambda: world.diary.append("child"))
        thread.join()
        assert not thread.is_alive()
        world.diary.append("parent")

    world.play(parent)
    assert world.diary == ["child", "parent"]


def test_bounded_choices_deviate_where_they_are_told() -> None:
    """The default runs each actor as far as it goes; one deviation swaps at one point."""

    def diary(deviations: dict[int, int]) -> str:
        scheduler = Scheduler(choices := BoundedChoices(deviations))
        lines: list[str] = []

        def actor(name: str) -> Callable[[], None]:
            def write() -> None:
                for _ in range(2):
                    lines.append(name)
                    scheduler.point()

            return write

        scheduler.spawn("a", actor("a"))
        scheduler.spawn("b", actor("b"))
        scheduler.run()
        assert all(width == 2 for width in choices.widths)
        return "".join(lines)

    assert diary({}) == "aabb"
    assert diary({0: 1}) == "abba"
