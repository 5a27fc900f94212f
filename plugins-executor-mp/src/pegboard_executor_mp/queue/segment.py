"""A named piece of shared memory: a file in ``/dev/shm``, its size checked, its pages really reserved, mapped.

Without the reservation the kernel hands out pages at first touch, and a full ``/dev/shm`` kills the process then with a bus
error. ``multiprocessing.shared_memory`` reserves nothing and, in older Pythons, has a tracker process unlink what others
still use; so this maps the file itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator

from pegboard_executor_mp.queue.contract import Closed, NoSharedMemory
from pegboard_executor_mp.queue.liveness import Process, pid_namespace

DIRECTORY = "/dev/shm"
PREFIX = "pegboard-mq-"


class Segment:
    """``data`` are the bytes, ``words`` the same memory as native 64-bit integers: Python stores and loads an aligned one with
    one machine instruction, which other processes see whole or not at all."""

    def __init__(self, name: str, fd: int, size: int) -> None:
        self.name = name
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.data = memoryview(self._map)
        self.words = self.data.cast("Q")
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor  # else the map could not be closed

    @classmethod
    def create(cls, size: int, setting: str) -> Segment:
        """``size``: bytes. ``setting`` names what to lower when there is no room. Raises ``NoSharedMemory``."""
        remove_orphans()
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > (free := free_bytes()):
            raise _no_room(size, free, setting)
        name = f"{own_names(PREFIX)}{secrets.token_hex(6)}"
        fd = os.open(os.path.join(DIRECTORY, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            return cls(name, fd, size)
        except OSError as error:
            unlink(name)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _no_room(size, free_bytes(), setting) from error
            raise
        except BaseException:
            unlink(name)
            raise
        finally:
            os.close(fd)

    @classmethod
    @contextlib.contextmanager
    def open_locked(cls, name: str) -> Iterator[Segment]:
        """The segment ``name``; no other process attaches to it inside the block. Raises ``Closed`` if it is gone."""
        try:
            fd = os.open(os.path.join(DIRECTORY, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise Closed(f"queue {name} is closed, or all its readers have attached") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # the kernel takes it back from a process that ends
            yield cls(name, fd, os.fstat(fd).st_size)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # the map holds a duplicate of the descriptor, and so would hold the lock
            os.close(fd)

    def unlink(self) -> None:
        unlink(self.name)

    def close(self) -> None:
        """Unmap. Idempotent."""
        self.words.release()
        self.data.release()
        self._map.close()


def free_bytes() -> int:
    """Free bytes of ``/dev/shm``."""
    stat = os.statvfs(DIRECTORY)
    return stat.f_bavail * stat.f_frsize


def own_names(prefix: str) -> str:
    """How names in ``/dev/shm`` begin that this process gives: they tell whose they are."""
    me = Process.current()
    return f"{prefix}{me.pid}-{me.start}-{pid_namespace()}-"


def owned(prefix: str) -> list[tuple[str, Process]]:
    """Names that begin with ``prefix``, and who gave them. Those of other pid namespaces, where the same pids mean others, are
    not among them."""
    here, found = pid_namespace(), []
    for name in os.listdir(DIRECTORY):
        owner = name.removeprefix(prefix).split("-")[:3] if name.startswith(prefix) else ()
        if len(owner) == 3 and all(part.isdecimal() for part in owner):
            pid, start, namespace = map(int, owner)
            if namespace == here:
                found.append((name, Process(pid, start)))
    return found


def orphans(prefix: str) -> list[str]:
    """Names given by processes that have ended: killed before they could remove them."""
    return [name for name, owner in owned(prefix) if not owner.alive()]


def remove_orphans() -> None:
    """Remove the segments of processes that have ended."""
    for name in orphans(PREFIX):
        unlink(name)


def unlink(name: str) -> None:
    """Remove the name; the memory goes with its last mapping. Whoever comes second finds nothing to do, and neither does another
    user."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        os.unlink(os.path.join(DIRECTORY, name))


def _no_room(needed: int, free: int, setting: str) -> NoSharedMemory:
    what = f"the message queue needs {needed} bytes of shared memory, {DIRECTORY} has {free} bytes free"
    return NoSharedMemory(errno.ENOSPC, f"{what}: lower {setting}")
