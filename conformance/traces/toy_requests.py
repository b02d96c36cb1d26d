"""The requests of the toy engine, and a step of it while it is being scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field

from slotmirror.conformance.traces.trace import Part
from slotmirror.core.events import AdmittedRequest


@dataclass(eq=False)
class ToyRequest:
    """A request: its tokens so far, its blocks, how much of it is computed."""

    req_id: str
    owner: int
    prompt: int
    tokens_max: int
    prefixes: list[int] = field(default_factory=list)
    """Per position a fingerprint of all tokens up to it."""
    blocks: list[int] = field(default_factory=list)
    reported: int = 0
    """How many of the blocks were told to the cache."""
    computed: int = 0
    was_preempted: bool = False

    def extend(self, tokens: list[int]) -> None:
        """Append tokens."""
        fingerprint = self.prefixes[-1] if self.prefixes else 0
        for token in tokens:
            fingerprint = (fingerprint * 1_000_003 + token + 1) % (2**61 - 1)
            self.prefixes.append(fingerprint)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.prefixes)


@dataclass(slots=True)
class StepPlan:
    """A step while it is being scheduled."""

    ended: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    new: list[AdmittedRequest] = field(default_factory=list)
    resumed: list[AdmittedRequest] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    appended: dict[str, list[int]] = field(default_factory=dict)
    parts: list[tuple[ToyRequest, Part]] = field(default_factory=list)
    drafted: dict[str, int] = field(default_factory=dict)
    """Position up to which the drafts of each drafted request will turn out right."""
