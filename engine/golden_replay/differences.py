"""What a replay found."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """One recorded value that ours is not equal to.

    `where` names the vector or trace, and within a trace the operation's or step's index.
    `exception` names the rule by which we differ on purpose; None is a bug.
    """

    where: str
    field: str
    expected: object
    actual: object
    exception: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.field} should be {self.expected!r}, is {self.actual!r}"


@dataclass
class ReplayReport:
    """Differences, deliberate exceptions, and how much was compared."""

    differences: list[Difference] = field(default_factory=list)
    exceptions: list[Difference] = field(default_factory=list)
    num_hash_vectors: int = 0
    num_manager_ops: int = 0
    num_scheduler_steps: int = 0
    num_values: int = 0

    def compare(
        self, where: str, name: str, expected: object, actual: object, exception: str | None = None
    ) -> None:
        """Count a value, and keep it if it differs."""
        self.num_values += 1
        if expected != actual:
            found = Difference(where, name, expected, actual, exception)
            (self.differences if exception is None else self.exceptions).append(found)
