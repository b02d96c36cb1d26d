"""The builder thread: order, bounds, errors, shutdown. No test waits for a clock to pass."""

import threading
from collections.abc import Callable

import pytest

from slotmirror.engine.errors import EngineError
from slotmirror.engine.output_builder import OutputBuilder


def ignore(job: int) -> None:
    """Discard nothing."""


def make_builder(
    build: Callable[[int], None],
    discard: Callable[[int], None] = ignore,
    queue_length_max: int = 4,
    wait_timeout_s: float = 30.0,
) -> OutputBuilder[int]:
    return OutputBuilder(
        "test",
        build=build,
        discard=discard,
        queue_length_max=queue_length_max,
        wait_timeout_s=wait_timeout_s,
    )


def test_jobs_are_built_in_order_on_another_thread() -> None:
    """Jobs run in the order of submission, on one thread that is not the caller's."""
    built: list[tuple[int, int]] = []
    builder = make_builder(lambda job: built.append((job, threading.get_ident())))
    numbers = [builder.submit(job) for job in range(20)]
    builder.wait_done(numbers[-1])
    builder.close()
    assert numbers == list(range(1, 21))
    assert [job for job, _ in built] == list(range(20))
    assert len({thread for _, thread in built} - {threading.get_ident()}) == 1


def test_close_builds_what_is_queued() -> None:
    """Closing waits for the queued jobs; closing twice is harmless; a later job is refused."""
    release, built = threading.Event(), []

    def build(job: int) -> None:
        release.wait(30)
        built.append(job)

    builder = make_builder(build)
    for job in range(3):
        builder.submit(job)
    release.set()
    builder.close()
    builder.close()
    assert built == [0, 1, 2]
    with pytest.raises(EngineError, match="'test' is closed"):
        builder.submit(3)


def test_close_without_a_job_starts_no_thread() -> None:
    """The thread starts with the first job only."""
    before = threading.active_count()
    builder = make_builder(ignore)
    builder.close()
    assert threading.active_count() == before


def test_failure_reaches_the_caller_and_later_jobs_are_discarded() -> None:
    """The first failure is the cause of every later error; no job after it is built."""
    release, built, discarded = threading.Event(), [], []

    def build(job: int) -> None:
        release.wait(30)
        if job == 1:
            raise ValueError("broken row")
        built.append(job)

    builder = make_builder(build, discarded.append)
    for job in range(4):
        builder.submit(job)
    release.set()
    for _ in range(2):
        with pytest.raises(EngineError, match="ValueError: broken row") as caught:
            builder.wait_done(4)
        assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineError, match="broken row"):
        builder.submit(4)
    builder.close()
    assert built == [0]
    assert discarded == [2, 3]


def test_a_failing_discard_does_not_hide_the_first_failure() -> None:
    """Errors while discarding are not reported in place of the first one."""

    def fail(job: int) -> None:
        raise ValueError(f"job {job}")

    builder = make_builder(fail, fail)
    builder.submit(0)
    with pytest.raises(EngineError, match="job 0"):
        builder.wait_done(1)
    builder.close()


def test_full_queue_holds_the_submitter_back() -> None:
    """With the queue full a submit waits, bounded, and its error names what it waits for."""
    entered, release = threading.Event(), threading.Event()

    def build(job: int) -> None:
        entered.set()
        release.wait(30)

    builder = make_builder(build, queue_length_max=1, wait_timeout_s=0.01)
    builder.submit(0)
    assert entered.wait(30)
    builder.submit(1)
    with pytest.raises(EngineError, match=r"waited 0.01 s for room .*: 0 of 2 jobs are done"):
        builder.submit(2)
    with pytest.raises(EngineError, match=r"for job 2 .*: 0 of 2 jobs are done"):
        builder.wait_done(2)
    with pytest.raises(EngineError, match="still in job 1"):
        builder.close()
    release.set()
    builder._wait_timeout_s = 30.0
    builder.close()
