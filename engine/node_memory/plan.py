"""Host memory of all stages times replicas, and whether a node's limits allow it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from slotmirror.core.errors import ConfigError
from slotmirror.core.memory_plan import MemoryPlan, plan_memory
from slotmirror.engine.node_memory.limits import Limit, Memlock
from slotmirror.engine.node_memory.stages import StageSettings

_KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Host bytes of one process of a stage.

    Attributes:
        settings: the stage.
        memory: pools, pages and bounce buffers at their own sizes.
        pinned_bytes: the page-locked part, each buffer rounded up as torch's allocator does.
        rounding_bytes: what that rounding adds, at most: nothing where the allocator is set
            otherwise, or the backend page-locks a large pool at its exact size.
    """

    settings: StageSettings
    memory: MemoryPlan
    pinned_bytes: int
    rounding_bytes: int

    @property
    def hit_output_bytes(self) -> int:
        """Hit outputs that may be alive at once; 0 where the stage sets no bound."""
        return self.settings.config.hit_buffer_bytes_max or 0

    @property
    def host_bytes(self) -> int:
        """All of it."""
        return self.memory.host_bytes + self.rounding_bytes + self.hit_output_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit beside what is needed of it, and what to change where it is too small."""

    subject: str
    needed_bytes: int
    limit: Limit
    remedy: str

    @property
    def fits(self) -> bool:
        """Whether the limit allows it."""
        return self.limit.allows(self.needed_bytes)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Host bytes of a node that runs so many replicas of a pipeline."""

    stages: tuple[StageMemory, ...]
    replicas: int

    @property
    def replica_bytes(self) -> int:
        """Host bytes of all processes of one replica."""
        return sum(stage.settings.processes * stage.host_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Host bytes of the node."""
        return self.replicas * self.replica_bytes

    @property
    def pinned_bytes(self) -> int:
        """The page-locked part of `host_bytes`."""
        one = sum(stage.settings.processes * stage.pinned_bytes for stage in self.stages)
        return self.replicas * one

    @property
    def unbounded_stages(self) -> list[str]:
        """Stages whose hit outputs have no bound, and are not in any figure."""
        stages = (stage.settings for stage in self.stages)
        return [stage.name for stage in stages if stage.config.hit_buffer_bytes_max is None]

    def verdicts(self, memory: Iterable[Limit], memlock: Memlock) -> list[Verdict]:
        """Each limit's verdict: of memory for the node, of memlock for its largest process."""
        of_memory = [
            Verdict("host memory of the node", self.host_bytes, limit, self._memory_remedy(limit))
            for limit in memory
        ]
        largest = max(self.stages, key=lambda stage: stage.pinned_bytes)
        subject = f"page-locked by a process of {largest.settings.name!r}"
        remedy = _memlock_remedy(largest, memlock)
        return [*of_memory, Verdict(subject, largest.pinned_bytes, memlock.soft, remedy)]

    def _memory_remedy(self, limit: Limit) -> str:
        replicas = (limit.num_bytes or 0) // self.replica_bytes
        fewer = f"lower replicas to {replicas}" if replicas else "not even one replica fits"
        more = "raise the container's limit" if limit.in_cgroup else "take a node with more memory"
        return f"{fewer}, lower num_blocks, or {more}"


def plan_node(stages: Iterable[StageSettings], replicas: int = 1) -> NodePlan:
    """What a node takes that runs `replicas` of these stages; allocates nothing.

    Raises:
        ConfigError: `replicas` is below 1, or there is no stage.
    """
    if replicas < 1:
        raise ConfigError("replicas", replicas, "must be at least 1")
    planned = tuple(map(_stage_memory, stages))
    if not planned:
        raise ConfigError("stages", [], "must be at least one")
    return NodePlan(planned, replicas)


def _stage_memory(stage: StageSettings) -> StageMemory:
    memory = plan_memory(stage.config, stage.keys, stage.deferred_keys)
    exact = list(_pinned_buffers(stage, memory))
    rounded = sum(1 << (num_bytes - 1).bit_length() for num_bytes in exact)
    outputs = stage.config.hit_buffer_bytes_max or 0 if stage.config.pin_outputs else 0
    return StageMemory(stage, memory, rounded + outputs, rounded - sum(exact))


def _pinned_buffers(stage: StageSettings, memory: MemoryPlan) -> Iterator[int]:
    """Sizes of the page-locked buffers: a page has one per key."""
    for key in memory.keys:
        depth = stage.config.staging_depth
        yield from [key.staging_bytes // depth] * depth
        if stage.config.pin_pool:
            yield key.pool_bytes
    if memory.bounce_bytes:
        yield from [memory.bounce_bytes // 2] * 2


def _memlock_remedy(stage: StageMemory, memlock: Memlock) -> str:
    if memlock.hard.allows(stage.pinned_bytes):
        kib = -(-stage.pinned_bytes // _KIB)
        return f"run `ulimit -l {kib}` before the start: the hard limit allows it"
    lower = "lower staging_depth or staging_capacity_tokens"
    return (
        "raise the hard limit (docker --ulimit memlock=-1, LimitMEMLOCK=infinity of a service), or "
        + ("unset pin_pool" if stage.settings.config.pin_pool else lower)
    )
