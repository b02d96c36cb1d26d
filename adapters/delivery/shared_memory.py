"""Whole requests in shared memory, for a consumer process of the same user.

Segments are safetensors files in a folder on the memory file system: written whole or not at all,
mapped by the reader without a copy, unlinked when it has taken them. The producer holds a lock on
its folder while it lives, so whoever comes next, reader or producer, sees that it died and removes
what it left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slotmirror.adapters.delivery.file_names import SUFFIX, file_name
from slotmirror.adapters.delivery.file_sink import read_rows, write_rows
from slotmirror.adapters.delivery.request_rows import RequestRows
from slotmirror.adapters.delivery.sink import Sink
from slotmirror.adapters.errors import SinkFullError
from slotmirror.core.errors import ConfigError

MEMORY_FILE_SYSTEM = Path("/dev/shm")
_OWNER = ".owner"
_ROOT_LOCK = ".lock"
_POLL_S = 0.002


class SharedMemorySink(Sink):
    """The producer's side of `name`; at most `bytes_max` are unread at once.

    A single request larger than that is admitted alone. Raises `ConfigError` if a living producer
    of this user has the name.
    """

    def __init__(self, name: str, *, bytes_max: int, root: Path = MEMORY_FILE_SYSTEM) -> None:
        self._bytes_max = bytes_max
        self._stop = threading.Event()
        self._count = 0
        base = _private_folder(root)
        self.folder = _folder_of(base, name)
        with _locked(base / _ROOT_LOCK):
            _remove_dead(base)
            if self.folder.exists():
                raise ConfigError("name", name, "a living producer has it: choose another")
            self.folder.mkdir(mode=0o700)
            self._owner = _try_lock(self.folder / _OWNER)

    def write(self, request: RequestRows) -> None:
        """Waits for the reader to make room, until `stop_waiting`."""
        while not self._has_room(request.num_bytes):
            if self._stop.wait(_POLL_S):
                raise SinkFullError(f"no room in {self.folder}: its reader does not take requests")
        self._count += 1
        write_rows(request, self.folder / f"{self._count:012d}-{file_name(request.req_id)}")

    def stop_waiting(self) -> None:
        """See `Sink.stop_waiting`."""
        self._stop.set()

    def close(self) -> None:
        """Unread requests stay for the reader; an empty folder goes."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        with _locked(self.folder.parent / _ROOT_LOCK):
            os.close(owner)
            if not any(_requests(self.folder)):
                shutil.rmtree(self.folder)

    def _has_room(self, num_bytes: int) -> bool:
        # The reader unlinks files meanwhile, so they are looked at one by one.
        unread = sum(map(_size, _requests(self.folder)))
        return not unread or unread + num_bytes <= self._bytes_max


class SharedMemoryReader:
    """The consumer's side of `name`: takes whole requests in the order they were written."""

    def __init__(self, name: str, *, root: Path = MEMORY_FILE_SYSTEM) -> None:
        self._base = _private_folder(root)
        self.folder = _folder_of(self._base, name)

    def take(self, timeout_s: float) -> RequestRows | None:
        """The next request, or None after `timeout_s`, or once the producer is gone.

        The tensors are views of shared memory that lives as long as they do.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            alive = self.producer_alive()
            path = min(_requests(self.folder), default=None)
            if path is not None:
                request = read_rows(path)
                path.unlink()
                return request
            if not alive or time.monotonic() >= deadline_s:
                return None
            time.sleep(_POLL_S)

    def producer_alive(self) -> bool:
        """Whether the producer runs; False before its start, too."""
        try:
            lock = _try_lock(self.folder / _OWNER, create=False)
        except FileNotFoundError:
            return False
        if lock is None:
            return True
        os.close(lock)
        return False

    def close(self) -> None:
        """Remove what a producer that is gone has left."""
        with _locked(self._base / _ROOT_LOCK):
            if not self.producer_alive():
                shutil.rmtree(self.folder, ignore_errors=True)


def _requests(folder: Path) -> Iterator[Path]:
    """Complete segments, in no order; their names begin with the count, which is the order."""
    return folder.glob(f"*{SUFFIX}")


def _private_folder(root: Path) -> Path:
    """This user's folder, refused if another user could have put anything into it."""
    if not root.is_dir():
        raise ConfigError("sink", "shared_memory", f"needs {root}, which does not exist here")
    folder = root / f"slotmirror-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not private or found.st_uid != os.geteuid():
        raise ConfigError("sink", "shared_memory", f"{folder} is not private to this user")
    return folder


def _folder_of(base: Path, name: str) -> Path:
    if not name:
        raise ConfigError("name", name, "must name the shared memory")
    return base / file_name(name).removesuffix(SUFFIX)


def _remove_dead(base: Path) -> None:
    for folder in base.iterdir():
        if not folder.is_dir():
            continue
        lock = _try_lock(folder / _OWNER)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(path: Path, *, create: bool = True) -> int | None:
    """The descriptor of a lock on `path`, or None where a living process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # the reader took it meanwhile
        return 0
