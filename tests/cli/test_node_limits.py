"""The limits on host memory, read from files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotmirror.core.errors import ConfigError
from slotmirror.engine.node_memory import memlock_limit, memory_limits
from support.kernel_files import V1_UNLIMITED, plant_kernel_files

MIB = 1 << 20


def cgroup(root: Path) -> tuple[int | None, str]:
    """The cgroup's limit and the file it stands in."""
    _, limit = memory_limits(None, root)
    return limit.num_bytes, limit.source.removeprefix(f"{root}/")


def test_physical_memory(tmp_path: Path) -> None:
    """`MemTotal`, in bytes."""
    physical, _ = memory_limits(None, plant_kernel_files(tmp_path, memory_kib=24683652))
    assert (physical.name, physical.num_bytes) == ("physical memory", 24683652 * 1024)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (("8388608", "8388608"), (8388608, 8388608)),
        (("65536", "unlimited"), (65536, None)),
        (("unlimited", "unlimited"), (None, None)),
    ],
)
def test_memlock(
    tmp_path: Path, shown: tuple[str, str], expected: tuple[int | None, int | None]
) -> None:
    """Soft and hard limit in bytes, None for unlimited."""
    memlock = memlock_limit(None, plant_kernel_files(tmp_path, memlock=shown))
    assert (memlock.soft.num_bytes, memlock.hard.num_bytes) == expected


def test_a_container_with_cgroup_v2(tmp_path: Path) -> None:
    """In a namespace of its own the limit stands at the top."""
    root = plant_kernel_files(tmp_path, v2={"": 64 * MIB})
    assert cgroup(root) == (64 * MIB, "sys/fs/cgroup/memory.max")


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """Every cgroup above bounds the process too; "max" is no limit; siblings are none of ours."""
    limits = {"a/b/c": "max", "a/b": 20 * MIB, "a": 10 * MIB, "a/other": MIB}
    assert cgroup(plant_kernel_files(tmp_path, group="/a/b/c", v2=limits)) == (
        10 * MIB,
        "sys/fs/cgroup/a/memory.max",
    )


def test_cgroup_v1(tmp_path: Path) -> None:
    """The memory controller's own mount and path; the largest number is no limit."""
    limits = {"": V1_UNLIMITED, "pod": 3 * MIB, "pod/one": V1_UNLIMITED}
    assert cgroup(plant_kernel_files(tmp_path, group="/pod/one", v1=limits)) == (
        3 * MIB,
        "sys/fs/cgroup/memory/pod/memory.limit_in_bytes",
    )


def test_a_container_with_cgroup_v1(tmp_path: Path) -> None:
    """Without a namespace the path is the host's, and the mount shows that folder as its top."""
    root = plant_kernel_files(
        tmp_path, group="/docker/1f", mounted="/docker/1f", v1={"": 5 * MIB, "docker/1f": MIB}
    )
    assert cgroup(root) == (5 * MIB, "sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_a_path_that_leads_out_of_the_mount_is_its_top(tmp_path: Path) -> None:
    """A process moved above its namespace sees `/../..`; what is mounted is what can be read."""
    root = plant_kernel_files(tmp_path, group="/../../pod", v2={"": 7 * MIB})
    assert cgroup(root) == (7 * MIB, "sys/fs/cgroup/memory.max")


def test_v1_and_v2_together(tmp_path: Path) -> None:
    """On a hybrid machine whichever has the memory controller answers."""
    root = plant_kernel_files(tmp_path, group="/x", v1={"x": 9 * MIB}, v2={})
    assert cgroup(root) == (9 * MIB, "sys/fs/cgroup/memory/x/memory.limit_in_bytes")


@pytest.mark.parametrize("limits", [{"": "max"}, {}])
def test_no_cgroup_sets_a_limit(tmp_path: Path, limits: dict[str, object]) -> None:
    """The topmost cgroup of v2 has no such file at all."""
    root = plant_kernel_files(tmp_path, v2=limits)
    assert cgroup(root) == (None, "no cgroup sets one")


def test_a_kernel_without_cgroups(tmp_path: Path) -> None:
    """No mount, no path, no file: no limit."""
    root = plant_kernel_files(tmp_path)
    (root / "proc/self/cgroup").unlink()
    assert cgroup(root) == (None, "no cgroup sets one")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("meminfo", None, "memory_limit=None: .*/proc/meminfo cannot be read .No such file"),
        ("meminfo", "MemFree: 1 kB\n", "memory_limit=None: .*/proc/meminfo has no MemTotal"),
        ("self/limits", None, "memlock_limit=None: .*/limits cannot be read .No such file"),
        ("self/limits", "Max stack 1 2\n", "memlock_limit=None: .*no line for locked memory"),
    ],
)
def test_a_machine_that_says_nothing_is_told_to_the_user(
    tmp_path: Path, file: str, text: str | None, error: str
) -> None:
    """The error names the option that gives the limit instead, and the file."""
    path = plant_kernel_files(tmp_path) / "proc" / file
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        memory_limits(None, tmp_path), memlock_limit(None, tmp_path)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("512m", 512 * MIB), ("2G", 2 << 30), ("3Ki", 3072), ("1 TiB", 1 << 40), ("7b", 7)],
)
def test_a_given_limit_is_read_as_docker_and_kubernetes_write_it(text: str, num_bytes: int) -> None:
    """All units are binary; the machine is not asked."""
    [limit] = memory_limits(text, Path("nowhere"))
    assert limit.num_bytes == num_bytes
    assert memlock_limit(text, Path("nowhere")).soft.num_bytes == num_bytes
