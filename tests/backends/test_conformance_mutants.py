"""Every fault that the kit is for makes the check fail that is about it, and no false alarm."""

from __future__ import annotations

import re

import pytest

from slotmirror.conformance.backend_suite.performing import perform
from slotmirror.conformance.backend_suite.suite import ALL_CHECKS
from support import backend_mutants as mutants
from support import host_mutants
from support.source_tree import ROOT
from support.stand_in.backends import StandInCuda
from support.stand_in.bench import StandInWorkbench

HEADING = "## Faulty backends"
CHECKS = {check.name: check for check in ALL_CHECKS}

CAUGHT_BY = {
    mutants.DoesNotWaitForTheEngine: "copies_wait_for_the_engines_stream",
    mutants.RecordsBeforeCopying: "bytes_have_arrived_when_the_fence_is_reached",
    mutants.RecordsOnTheEnginesStream: "bytes_have_arrived_when_the_fence_is_reached",
    mutants.WaitsNever: "a_fence_is_reached_only_behind_its_work",
    mutants.WaitsWithoutBound: "waits_are_bounded",
    mutants.ReusesOneEvent: "fences_are_independent",
    mutants.RecordsOnce: "a_fence_serves_again_and_again",
    mutants.NeverHoldsAStreamBack: "wait_on_holds_a_stream_back",
    mutants.BindsNothing: "binding_makes_the_device_current",
    mutants.CopiesTheFirstPairOnly: "every_pair_arrives_whole",
    mutants.DropsTheDtype: "every_pair_arrives_whole",
    mutants.IgnoresStrides: "strided_sources_arrive_in_order",
    mutants.FreesItsTemporaries: "strided_sources_arrive_in_order",
    mutants.WritesBesideTheDestination: "rows_beside_the_destination_stay",
    mutants.CopiesSynchronously: "an_asynchronous_copy_returns_before_its_bytes",
    mutants.HidesItsAsynchrony: "an_asynchronous_copy_returns_before_its_bytes",
    mutants.SnapshotsAreTheOriginals: "snapshots_survive_the_next_forward",
    mutants.SnapshotsKeepStrides: "snapshots_are_contiguous_device_copies",
    mutants.OwnsEverything: "only_device_tensors_are_owned",
    host_mutants.LeaksBuffers: "close_gives_the_memory_back",
    host_mutants.ForgetsToUncount: "page_locked_bytes_are_counted",
    host_mutants.LiesAboutPinning: "page_locking_is_declared_truly",
    host_mutants.ReportsNoRounding: "reserved_bytes_cover_the_tensor",
    host_mutants.Misaligns: "host_buffers_are_aligned",
    host_mutants.FollowsTheDefaultDevice: (
        "host_buffers_lie_on_the_host_whatever_the_default_device"
    ),
    host_mutants.SharesBuffers: "buffers_do_not_overlap",
    host_mutants.FirstDuplicateWins: "the_last_of_duplicate_slots_stays",
    host_mutants.RoundsAwayOddWidthsOnReads: "gathered_rows_match_the_reference",
    host_mutants.RoundsAwayOddWidthsOnWrites: "scattered_rows_match_the_reference",
    host_mutants.WritesOutOfBounds: "slots_out_of_range_reach_no_other_memory",
    host_mutants.FailsOnNoRows: "no_rows_are_no_work",
    mutants.ClaimsDeviceCopies: "rows_come_back_to_the_device",
    mutants.HidesDeviceCopies: "undeclared_device_copies_raise_not_supported",
    mutants.RecordsBeforeCopyingToTheDevice: "rows_come_back_to_the_device",
    mutants.SpeaksAnotherVersion: "it_speaks_this_interface_version",
    mutants.ChangesItsCapabilities: "capabilities_are_constant_and_possible",
    mutants.ProbeGivesNoReason: "the_probe_answers_in_full",
    mutants.ProbeChangesTheEnvironment: "the_probe_has_no_side_effects",
    mutants.ProbeImportsARuntime: "the_probe_has_no_side_effects",
    mutants.ProbeRaises: "the_probe_survives_hidden_devices",
}

ALSO_CAUGHT_BY = [
    (mutants.BindsNothing, "a_bound_thread_can_do_everything"),
    (mutants.SnapshotsAreTheOriginals, "golden_traces_match_with_a_mover_thread"),
    (host_mutants.LosesTheFirstRowOfReads, "golden_traces_match_inline"),
    (mutants.RecordsBeforeCopying, "random_lives_of_buffers_copies_and_fences"),
]


def table_rows() -> list[str]:
    """A row for each mutant: its name and its check's as words."""
    return [
        f"| {re.sub('(?<!^)(?=[A-Z])', ' ', mutant.__name__).lower()} | {check.replace('_', ' ')} |"
        for mutant, check in CAUGHT_BY.items()
    ]


def test_the_page_of_mutants_names_each_with_its_check() -> None:
    """The table of docs/mutants.md is this file's, row by row."""
    _, _, section = (ROOT / "docs" / "mutants.md").read_text("utf-8").partition(HEADING)
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert rows[2:] == table_rows()


@pytest.mark.parametrize(
    ("mutant", "name"),
    [*CAUGHT_BY.items(), *ALSO_CAUGHT_BY],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_faulty_backend_fails_the_check_that_is_about_its_fault(mutant, name):
    """The check named beside the mutant fails; what it found is about the contract."""
    outcome = perform(CHECKS[name], lambda: StandInWorkbench(mutant()), {})
    assert outcome.status == "failed", outcome


@pytest.mark.parametrize("name", sorted({*CAUGHT_BY.values(), *(n for _, n in ALSO_CAUGHT_BY)}))
def test_the_backend_without_a_fault_passes_these_checks(name):
    """What catches a mutant does not catch the backend that it was made of."""
    outcome = perform(CHECKS[name], lambda: StandInWorkbench(StandInCuda()), {})
    assert outcome.status == "passed", outcome
