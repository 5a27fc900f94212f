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
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > (free := free_bytes()):
            raise _no_room(size, free, setting)
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
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


def unlink(name: str) -> None:
    """Remove the name; the memory goes with its last mapping. Whoever comes second finds nothing to do."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(DIRECTORY, name))


def _no_room(needed: int, free: int, setting: str) -> NoSharedMemory:
    what = f"the message queue needs {needed} bytes of shared memory, {DIRECTORY} has {free} bytes free"
    return NoSharedMemory(errno.ENOSPC, f"{what}: lower {setting}")
