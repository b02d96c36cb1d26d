"""Mutants that show when something fails, stalls, or runs on a thread of its own."""

from __future__ import annotations

import sys

import pytest

from support.mutants import insides
from support.mutants.mutant import Mutant


def _failing() -> bool:
    """Whether an exception is being handled right now."""
    return sys.exc_info()[0] is not None


def a_failed_save_keeps_its_bytes(patches: pytest.MonkeyPatch) -> None:
    release = insides.RELEASE_BYTES.original
    insides.RELEASE_BYTES.replace(patches, lambda self, n: None if _failing() else release(self, n))


def a_failed_save_keeps_its_page(patches: pytest.MonkeyPatch) -> None:
    let_go = insides.LET_GO_OF_PAGE.original
    insides.LET_GO_OF_PAGE.replace(
        patches, lambda self, page: None if _failing() else let_go(self, page)
    )


def the_mover_binds_no_device(patches: pytest.MonkeyPatch) -> None:
    insides.BIND_MOVER.replace(patches, lambda self: None)


def a_stalled_device_kills_the_cache(patches: pytest.MonkeyPatch) -> None:
    wait_fence = insides.WAIT_FENCE.original

    def bounded(self, fence):
        if not fence.wait(insides.claim_timeout_s(self)):
            raise TimeoutError("the device is late")
        wait_fence(self, fence)

    insides.WAIT_FENCE.replace(patches, bounded)


def clones_are_freed_before_their_copy_has_run(patches: pytest.MonkeyPatch) -> None:
    arrive = insides.ARRIVE_ON_PAGE.original

    def too_early(self, mover):
        insides.forget_what_is_read(self)
        arrive(self, mover)

    insides.ARRIVE_ON_PAGE.replace(patches, too_early)


def clones_of_a_failed_launch_are_freed_at_once(patches: pytest.MonkeyPatch) -> None:
    give_up = insides.GIVE_UP_LAUNCH.original

    def without_clones(self, page, whose):
        insides.forget_what_is_read(page)
        give_up(self, page, whose)

    insides.GIVE_UP_LAUNCH.replace(patches, without_clones)


def sources_for_the_device_are_freed_at_once(patches: pytest.MonkeyPatch) -> None:
    insides.FORGET_SENT.replace(patches, insides.forget_sources)


def a_stored_failure_keeps_its_frames(patches: pytest.MonkeyPatch) -> None:
    insides.WITHOUT_TRACEBACKS.replace(patches, lambda error: error)


MUTANTS = [
    Mutant(12, "a save that fails after reserving leaks its bytes",
           a_failed_save_keeps_its_bytes, faults=True),
    Mutant(13, "a half-failed save makes the next one hang", a_failed_save_keeps_its_page,
           faults=True),
    Mutant(19, "a thread works on the wrong device", the_mover_binds_no_device),
    Mutant(29, "a stalled peer rank's time-out kills the cache", a_stalled_device_kills_the_cache,
           faults=True),
    Mutant(31, "clones are freed under a running copy", clones_are_freed_before_their_copy_has_run),
    Mutant(31, "clones of a failed launch are freed under a running copy",
           clones_of_a_failed_launch_are_freed_at_once, faults=True),
    Mutant(31, "rows are freed while they are copied to the device",
           sources_for_the_device_are_freed_at_once),
    Mutant(31, "a stored traceback keeps clones alive for ever", a_stored_failure_keeps_its_frames,
           faults=True),
]  # fmt: skip
