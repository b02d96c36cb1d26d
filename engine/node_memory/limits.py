"""The limits on host memory that the kernel sets a process: physical, cgroup, memlock.

Every function takes the root of the file system, so that a test can give another one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slotmirror.core.errors import ConfigError
from slotmirror.engine.node_memory.sizes import parse_size

_ROOT = Path("/")
_UNLIMITED_FROM = 1 << 62
"""cgroup v1 has no word for "no limit": it shows the largest multiple of the page size."""

_MEM_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)
_MEMLOCK = re.compile(r"^Max locked memory\s+(\d+|unlimited)\s+(\d+|unlimited)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes at most, None where there is no limit, and where that stands."""

    name: str
    num_bytes: int | None
    source: str
    in_cgroup: bool = False

    def allows(self, num_bytes: int) -> bool:
        """Whether so many bytes are within the limit."""
        return self.num_bytes is None or num_bytes <= self.num_bytes


@dataclass(frozen=True, slots=True)
class Memlock:
    """Bytes that one process may page-lock: what holds, and up to where it may raise that."""

    soft: Limit
    hard: Limit


def memory_limits(given: str | None, root: Path = _ROOT) -> tuple[Limit, ...]:
    """The memory of another node, `given` as a size, or else that of this machine.

    Raises:
        ConfigError: `given` is no size, or the kernel's files are missing.
    """
    if given is None:
        return _machine_memory(root)
    return (Limit("memory", parse_size("memory_limit", given), "--memory-limit"),)


def memlock_limit(given: str | None, root: Path = _ROOT) -> Memlock:
    """The memlock limit of another node, `given` as a size or "unlimited", or else this machine's.

    Raises:
        ConfigError: `given` is no size, or the kernel's file is missing.
    """
    if given is None:
        return _machine_memlock(root)
    num_bytes = None if given == "unlimited" else parse_size("memlock_limit", given)
    limit = Limit("memlock", num_bytes, "--memlock-limit")
    return Memlock(limit, limit)


def _machine_memory(root: Path) -> tuple[Limit, ...]:
    """Physical memory, and the smallest limit of this process's cgroups."""
    path = root / "proc/meminfo"
    found = _MEM_TOTAL.search(_read("memory_limit", path))
    if found is None:
        raise ConfigError("memory_limit", None, f"{path} has no MemTotal: give the node's memory")
    physical = Limit("physical memory", int(found[1]) << 10, str(path))
    return (physical, _cgroup_limit(root))


def _machine_memlock(root: Path) -> Memlock:
    """The limits of this process; what it starts inherits them."""
    path = root / "proc/self/limits"
    found = _MEMLOCK.search(_read("memlock_limit", path))
    if found is None:
        rule = f"{path} has no line for locked memory: give the node's limit"
        raise ConfigError("memlock_limit", None, rule)
    soft, hard = (None if text == "unlimited" else int(text) for text in found.groups())
    source = f"ulimit -l; hard limit: {found[2]}"
    return Memlock(Limit("memlock", soft, source), Limit("memlock", hard, source))


def _cgroup_limit(root: Path) -> Limit:
    """The smallest limit: each cgroup is bounded by those above it too."""
    limits = [
        Limit("cgroup memory", num_bytes, str(path), in_cgroup=True)
        for path in _limit_files(root)
        if (num_bytes := _limit_in(path)) is not None
    ]
    none = Limit("cgroup memory", None, "no cgroup sets one", in_cgroup=True)
    return min(limits, key=lambda limit: limit.num_bytes or 0, default=none)


def _limit_files(root: Path) -> Iterator[Path]:
    """The limit of this process's cgroup and of all above it that can be seen, v1 and v2."""
    mounts = dict(_cgroup_mounts(_text(root / "proc/self/mountinfo")))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        is_v2 = not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        if is_v2 not in mounts:
            continue
        mounted, mount_point = mounts[is_v2]
        top = root / mount_point.lstrip("/")
        # In a container the mount may show a part of the tree alone, or the path lead out of it.
        seen = Path(path).relative_to(mounted) if Path(path).is_relative_to(mounted) else Path()
        inside = Path() if ".." in seen.parts else seen
        for folder in (inside, *inside.parents):
            yield top / folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")


def _cgroup_mounts(mountinfo: str) -> Iterator[tuple[bool, tuple[str, str]]]:
    """Of v2, and of v1's memory controller: which part of the tree is mounted where."""
    for line in mountinfo.splitlines():
        place, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", maxsplit=2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            _, _, _, mounted, mount_point, *_ = place.split(" ")
            yield kind == "cgroup2", (mounted, mount_point)


def _limit_in(path: Path) -> int | None:
    text = _text(path).strip()
    if not text.isdecimal() or int(text) >= _UNLIMITED_FROM:
        return None
    return int(text)


def _text(path: Path) -> str:
    """What stands in a file that need not exist: a kernel without cgroups, v2's topmost one."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _read(setting: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror}): give the node's limit"
        raise ConfigError(setting, None, rule) from error
