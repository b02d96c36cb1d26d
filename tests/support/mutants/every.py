"""All mutants, in the order of the bugs."""

from __future__ import annotations

from support.mutants import failures, lifecycle, reads, writes

MUTANTS = sorted(
    [*reads.MUTANTS, *writes.MUTANTS, *lifecycle.MUTANTS, *failures.MUTANTS],
    key=lambda mutant: mutant.bug,
)

BY_A_TEST_OF_ITS_OWN = {20}
"""Bugs that no schedule shows: `test_mutants.py` has a test for each."""
