"""Files as the kernel shows them, under another root."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

V2_MOUNT = "29 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = (
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)
V1_UNLIMITED = 9223372036854771712


def plant_kernel_files(
    root: Path,
    *,
    memory_kib: int = 1024,
    memlock: tuple[str, str] = ("unlimited", "unlimited"),
    group: str = "/",
    mounted: str = "/",
    v1: Mapping[str, object] | None = None,
    v2: Mapping[str, object] | None = None,
) -> Path:
    """`root` with the memory files of a machine whose process is in the cgroup `group`.

    `mounted` is the part of the cgroup tree that is mounted; `v1` and `v2` have the limit of each
    folder below the mount point.
    """
    me = root / "proc" / "self"
    me.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal:       {memory_kib} kB\nMemFree:  1 kB\n", encoding="utf-8"
    )
    (me / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             96364                96364                processes \n"
        f"Max locked memory         {memlock[0]:20} {memlock[1]:20} bytes     \n",
        encoding="utf-8",
    )
    mounts = "22 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n"
    groups = ""
    if v1 is not None:
        mounts += V1_MOUNT.format(root=mounted)
        groups += f"9:cpu,cpuacct:/other\n4:memory:{group}\n"
        _plant(root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", v1)
    if v2 is not None:
        mounts += V2_MOUNT.format(root=mounted)
        groups += f"0::{group}\n"
        _plant(root / "sys/fs/cgroup", "memory.max", v2)
    (me / "mountinfo").write_text(mounts, encoding="utf-8")
    (me / "cgroup").write_text(groups, encoding="utf-8")
    return root


def _plant(mount_point: Path, name: str, limits: Mapping[str, object]) -> None:
    for folder, limit in limits.items():
        (mount_point / folder).mkdir(parents=True, exist_ok=True)
        (mount_point / folder / name).write_text(f"{limit}\n", encoding="utf-8")
