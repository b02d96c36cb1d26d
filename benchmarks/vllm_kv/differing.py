"""Comparing two sides value by value."""

from __future__ import annotations


class DifferenceError(Exception):
    """The sides differ: where, in what, and with which settings."""


class Comparison:
    """Counts the compared values of one run and stops at the first that differs."""

    def __init__(self, run: str, plan: object) -> None:
        self.num_values = 0
        self._run, self._plan = run, plan
        self._operation = "start"
        self._number = 0

    def begin(self, operation: str) -> None:
        """The next operation, for the error."""
        self._number += 1
        self._operation = operation

    def __call__(self, name: str, theirs: object, ours: object) -> None:
        self.num_values += 1
        if theirs != ours:
            raise DifferenceError(
                f"{self._run}, operation {self._number} ({self._operation}): {name}\n"
                f"  vLLM: {theirs}\n  ours: {ours}\n  with {self._plan}"
            )
