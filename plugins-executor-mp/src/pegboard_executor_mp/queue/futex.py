"""Sleeping on a word of shared memory, waking its sleepers, and a memory fence: all that needs the C library.

``wait`` sleeps only while the word still holds the value that the caller saw, which the kernel compares under the lock that
``wake`` takes too: a wake-up between the caller's look and its sleep is not lost. Words are the low 32 bits of the queue's
64-bit counters (both supported machines are little-endian), so storing a counter changes the word.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable

_SYSCALL = {"x86_64": 202, "aarch64": 98}
_WAIT_BITSET, _WAKE = 9, 1  # without FUTEX_PRIVATE_FLAG: the sleepers are other processes
_PR_SET_TIMERSLACK = 29
_ANY_BIT = 0xFFFFFFFF
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _load() -> tuple[Callable[..., int], int]:
    number = _SYSCALL.get(platform.machine())
    if sys.platform != "linux" or number is None or sys.byteorder != "little":
        raise OSError(
            f"the shared-memory queue needs Linux on x86-64 or arm64 (this is {sys.platform} on {platform.machine()}); "
            "readers over TCP (remote_readers) work everywhere"
        )
    return ctypes.CDLL(None).syscall, number


class Word:
    """A 32-bit futex word. Must not outlive its mapping; one thread at a time may ``wait`` through one ``Word``."""

    __slots__ = ("_address", "_deadline", "_deadline_pointer", "_syscall", "_wake")

    def __init__(self, address: int) -> None:
        syscall, number = _load()
        self._address = ctypes.c_void_p(address)
        self._deadline = _Timespec()
        self._deadline_pointer = ctypes.byref(self._deadline)
        self._syscall = (syscall, ctypes.c_long(number))
        self._wake = (syscall, ctypes.c_long(number), self._address, ctypes.c_int(_WAKE), ctypes.c_int(_EVERYBODY))

    def wait(self, seen: int, until: float) -> None:
        """Sleep until a ``wake``, a signal, or ``time.monotonic()`` reaches ``until``; not at all if the word is not
        ``seen`` any more. May return early: callers look again."""
        whole = int(until)
        self._deadline.seconds = whole
        self._deadline.nanoseconds = int((until - whole) * 1e9)
        syscall, number = self._syscall
        syscall(
            number,
            self._address,
            ctypes.c_int(_WAIT_BITSET),
            ctypes.c_uint32(seen),
            self._deadline_pointer,
            None,
            ctypes.c_uint32(_ANY_BIT),
        )

    def wake(self) -> None:
        """Wake every sleeper of this word, in all processes."""
        syscall, number, address, operation, count = self._wake
        syscall(number, address, operation, count, None, None, 0)


def sleep_precisely() -> None:
    """From now on the kernel ends timed sleeps of the calling thread when they are over, not up to 50 us later to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def make_fence() -> Callable[[], None]:
    """A full memory barrier for the calling thread. One fence belongs to one end of a queue and is used by one thread at a time.

    Python has no barrier of its own. Taking and releasing a lock is an atomic read-modify-write with acquire order followed by
    a store with release order. One such pair does not order what comes before against what comes after (on arm64 both may
    move into the middle); two pairs do: what comes before stays before the first release, which stays before the second
    acquire of the same lock, which stays before what comes after. On x86-64 the locked instruction is a barrier by itself.
    Acquiring never blocks, so an interrupt between the calls leaves nothing locked for good.
    """
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire(False)
        release()
        acquire(False)
        release()

    return fence


def make_order(fence: Callable[[], None]) -> Callable[[], None]:
    """A barrier that lets only later loads pass earlier stores. x86-64 orders everything else by itself: there it is nothing."""
    return _nothing if platform.machine() == "x86_64" else fence


def _nothing() -> None: ...
