"""Where the scheduler's decisions come from: a seed, or a list that is being searched."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

_WEIGHTS = (0.01, 0.05, 0.3, 1.0, 4.0)
_STAYS = (0.0, 0.4, 0.8, 0.95)


class Named(Protocol):
    """An actor or a queue that can be picked."""

    name: str


class Choices(Protocol):
    """Decides at every schedule point; deterministic."""

    def stays(self) -> bool:
        """Whether the running actor goes on without anybody else being looked at."""
        ...

    def pick(self, able: Sequence[Named], stayable: bool) -> int:
        """Which of these goes on. The first is the running actor if `stayable`."""
        ...

    def time_passes(self) -> bool:
        """Whether the clock moves to the next deadline although somebody could run."""
        ...


class SeededChoices:
    """Random choices with moods: in some runs the mover is slow, in some the builders.

    Each name gets a weight when it is first seen, and the whole run a readiness to switch, so
    that the seeds reach both fine interleavings and long stretches of one actor.
    """

    def __init__(self, seed: int, *, impatient: bool = False) -> None:
        self._rng = random.Random(seed)
        self._random = self._rng.random
        self._stay = self._rng.choice(_STAYS)
        self._weights: dict[str, float] = {}
        self._impatience = 0.002 if impatient else 0.0

    def stays(self) -> bool:
        return self._random() < self._stay

    def pick(self, able: Sequence[Named], stayable: bool) -> int:
        if len(able) == 1:
            return 0
        known = self._weights
        weights = [known.get(entity.name) or self._weigh(entity.name) for entity in able]
        left = self._random() * sum(weights)
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return index
        return len(weights) - 1

    def time_passes(self) -> bool:
        return self._impatience > 0 and self._random() < self._impatience

    def _weigh(self, name: str) -> float:
        weight = self._weights[name] = self._rng.choice(_WEIGHTS)
        return weight


class BoundedChoices:
    """One schedule of an exhaustive search: the default one, except at a few given points.

    By default whoever went on last goes on as long as it can. `deviations` says at which points,
    counted from 0, another is picked, and which; `widths` records how many there were to pick
    from at each point of the run.
    """

    def __init__(self, deviations: Mapping[int, int]) -> None:
        self._deviations = deviations
        self._last = ""
        self.widths: list[int] = []

    def stays(self) -> bool:
        return False

    def pick(self, able: Sequence[Named], stayable: bool) -> int:
        if len(able) == 1:
            return 0
        index = next((i for i, one in enumerate(able) if one.name == self._last), 0)
        index = (index + self._deviations.get(len(self.widths), 0)) % len(able)
        self.widths.append(len(able))
        self._last = able[index].name
        return index

    def time_passes(self) -> bool:
        return False
