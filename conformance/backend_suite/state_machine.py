"""Random lives of buffers, captures and fences, against a model of what must be where.

hypothesis draws the programs and shrinks a failing one to its shortest form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slotmirror.conformance.backend_suite.check import (
    Refused,
    checks_of,
    require,
    require_bytes,
)
from slotmirror.conformance.backend_suite.landing import Landing
from slotmirror.conformance.backend_suite.values import DTYPES, random_rows
from slotmirror.conformance.backend_suite.workbench import WAIT_S, Workbench

_EXAMPLES = 40
_STEPS = 30
_LANDINGS_MAX = 6


@dataclass(eq=False)
class _Flight:
    """A landing and, while a copy is under way, what it must bring."""

    landing: Landing
    expected: torch.Tensor | None = None
    kept: object = None


class Life:
    """The moves; each leaves the model and the backend in the same state."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._pinned_before = bench.backend.memory_info().pinned_bytes
        self._flights: list[_Flight] = []
        self._values: torch.Tensor = torch.zeros(0)
        self._engine: torch.Tensor | None = None
        self._seed = 0

    def compute(self, rows: int, width: int, dtype: torch.dtype) -> None:
        """The engine computes into a buffer, a new one where the layout changes."""
        self._seed += 1
        self._values = random_rows((rows, width), dtype, self._seed)
        staged = self._bench.tensor(self._values)
        if (
            self._engine is None
            or self._engine.shape != staged.shape
            or self._engine.dtype != dtype
        ):
            self._engine = self._bench.tensor(torch.zeros_like(self._values))
        self._bench.write(self._engine, staged)

    def capture(self) -> None:
        """Snapshot the engine's buffer and launch its copy to a free or a new landing."""
        if self._engine is None:
            return
        free = [f for f in self._flights if f.expected is None and self._fits(f)]
        if not free:
            if len(self._flights) == _LANDINGS_MAX:
                return
            free = [_Flight(Landing(self._bench, [self._engine]))]
            self._flights += free
        flight = free[0]
        kept = self._bench.backend.snapshot([self._engine])
        flight.landing.launch(kept)
        flight.expected, flight.kept = self._values, kept

    def ask(self, choice: int) -> None:
        """`done` never lies: when it says so the bytes are there."""
        flight = self._chosen(choice)
        if flight is not None and flight.expected is not None and flight.landing.fence.done():
            self._arrived(flight)

    def wait(self, choice: int) -> None:
        """A waited-for copy has its bytes."""
        flight = self._chosen(choice)
        if flight is not None and flight.expected is not None:
            require(flight.landing.fence.wait(WAIT_S), "a copy never ends")
            self._arrived(flight)

    def release(self, choice: int) -> None:
        """A landing is given back once its copy is over."""
        flight = self._chosen(choice)
        if flight is not None:
            self.wait(choice)
            flight.landing.wait()
            self._flights.remove(flight)

    def end(self) -> None:
        """Everything is given back; nothing is left page-locked."""
        while self._flights:
            self.release(0)
        left = self._bench.backend.memory_info().pinned_bytes - self._pinned_before
        require(left == 0, f"{left} page-locked bytes are left")

    def _fits(self, flight: _Flight) -> bool:
        target = flight.landing.tensors[0]
        return target.shape == self._values.shape and target.dtype == self._values.dtype

    def _chosen(self, choice: int) -> _Flight | None:
        return self._flights[choice % len(self._flights)] if self._flights else None

    def _arrived(self, flight: _Flight) -> None:
        expected, flight.expected, flight.kept = flight.expected, None, None
        if expected is not None:
            require_bytes(flight.landing.tensors[0], expected, "a captured buffer")


def random_lives_of_buffers_copies_and_fences(bench: Workbench) -> None:
    """Allocation, capture, asking, waiting and release in any order keep every byte."""
    try:
        import hypothesis.stateful as stateful
        from hypothesis import Verbosity, settings
    except ImportError as error:
        raise Refused("hypothesis is not installed: pip install 'slotmirror[test]'") from error
    stateful.run_state_machine_as_test(
        _machine(lambda: Life(bench)),
        settings=settings(
            max_examples=_EXAMPLES,
            stateful_step_count=_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            verbosity=Verbosity.quiet,
        ),
    )


def _machine(new_life: Callable[[], Life]) -> Any:
    import hypothesis.strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, rule

    choices = st.integers(0, _LANDINGS_MAX - 1)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.life = new_life()

        @rule(rows=st.integers(1, 9), width=st.integers(1, 9), dtype=st.sampled_from(DTYPES))
        def compute(self, rows: int, width: int, dtype: torch.dtype) -> None:
            self.life.compute(rows, width, dtype)

        @rule()
        def capture(self) -> None:
            self.life.capture()

        @rule(choice=choices)
        def ask(self, choice: int) -> None:
            self.life.ask(choice)

        @rule(choice=choices)
        def wait(self, choice: int) -> None:
            self.life.wait(choice)

        @rule(choice=choices)
        def release(self, choice: int) -> None:
            self.life.release(choice)

        def teardown(self) -> None:
            self.life.end()

    return Machine


LIFE_CHECKS = checks_of(random_lives_of_buffers_copies_and_fences)
