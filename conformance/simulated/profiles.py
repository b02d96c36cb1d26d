"""What kinds of device are simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of device.

    pinned_host           host buffers can be page-locked
    host_alignment_bytes  alignment of every host buffer
    async_copy            copies to the host run when their queue is stepped; otherwise a copy is
                          over when the call that asked for it returns
    rows_per_copy         a copy moves this many rows per step of its queue; 0: all at once
    device_copies         rows can be copied to the device
    """

    pinned_host: bool = True
    host_alignment_bytes: int = 1
    async_copy: bool = True
    rows_per_copy: int = 0
    device_copies: bool = True


PROFILES: dict[str, Profile] = {
    "plain": Profile(),
    "unpinned": Profile(pinned_host=False),
    "aligned": Profile(host_alignment_bytes=64),
    "synchronous": Profile(async_copy=False, pinned_host=False, device_copies=False),
    "slow": Profile(rows_per_copy=1),
}
"""By name; `plain` is what a backend gets that does not ask."""
