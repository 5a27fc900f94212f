"""How ranks wait for one another in shared memory: look, yield the processor, then sleep on a futex."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence

from pegboard.contracts.communicator import CommunicatorError, CommunicatorTimeout, PeerLost
from pegboard_plugins.communicators.fences import make_fence
from pegboard_plugins.communicators.peers import Process
from pegboard_plugins.communicators.segment import Segment
from pegboard_plugins.worker.threads import usable_cores

_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}.get(platform.machine())
"""Number of the system call."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

_LOOKS = 64
"""Looks, some microseconds in all, before the processor is yielded for the first time."""
SPIN_SECONDS = 300e-6
"""How long a rank yields before it sleeps: about what ranks differ by in a layer. Waking up takes 30 to 70 microseconds, a layer
of a small model not much longer, and a rank that waits in the middle of a forward has nothing else to do."""
CROWDED_SPIN_SECONDS = 20e-6
"""The same where ranks have to share cores: yielding keeps a core from the rank that is waited for."""
SLICE_SECONDS = 0.05
"""A sleeping rank looks this often whether the others still run."""


def unsupported() -> str | None:
    """Why ranks cannot wait like this on this machine."""
    if sys.platform != "linux" or _FUTEX is None:
        return f"needs Linux on x86-64 or arm64; this is {platform.system()} on {platform.machine()}"
    return None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_syscall = ctypes.CDLL(None, use_errno=True)["syscall"]
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
]


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``value``: until woken, a signal, or ``seconds`` later."""
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    if _syscall(_FUTEX, address, _FUTEX_WAIT, value, limit, None, 0) < 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, f"futex: {os.strerror(number)}")


def futex_wake(address: int) -> None:
    _syscall(_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def spin_seconds(processes: Sequence[Process]) -> float:
    """For ranks that run in these processes: whether there is a core for each."""
    cores: set[int] = set()
    for process in processes:
        try:
            cores |= os.sched_getaffinity(process.pid)
        except OSError:  # it has ended; whoever waits for it will say so
            continue
    own = len(os.sched_getaffinity(0))
    quota = usable_cores()
    available = len(cores) if quota >= own else min(quota, len(cores))
    return SPIN_SECONDS if available >= len(processes) else CROWDED_SPIN_SECONDS


class Waiter:
    """One rank's waiting and waking. ``group`` and ``timeout`` as in ``Communicator``."""

    def __init__(self, segment: Segment, rank: int, group: str, timeout: float) -> None:
        self._words = segment.words
        self._rank, self._who, self._timeout = rank, f"group {group!r}, rank {rank}", timeout
        ranks = range(segment.world_size)
        self._processes = [segment.process(r) for r in ranks]
        self._left = [segment.left(r) for r in ranks]
        self._asleep = segment.asleep(rank)
        self._sleepers = {r: (segment.asleep(r), segment.address(segment.asleep(r))) for r in ranks}
        self._others = [self._sleepers[r] for r in ranks if r != rank]
        self._spin = spin_seconds(self._processes)
        self._looks = _LOOKS if self._spin == SPIN_SECONDS else 1
        self._stopped = False
        self.fence = make_fence()

    def announce(self, word: int, value: int, to: int | None = None) -> None:
        """Publish everything written so far: store ``value`` and wake those that sleep, or only the rank ``to``."""
        words, fence = self._words, self.fence
        fence()
        words[word] = value
        fence()
        for asleep, address in self._others if to is None else (self._sleepers[to],):
            if words[asleep]:
                words[asleep] = 0
                futex_wake(address)

    def wait(self, peers: Sequence[int], indices: Sequence[int], value: int, what: Callable[[], str]) -> None:
        """Until the word of each peer is at least ``value``; then all that was written before it can be read. ``what`` is being
        waited for, in words. Raises ``PeerLost`` and ``CommunicatorTimeout``."""
        words = self._words
        for index in indices:
            if words[index] < value:
                if not self._yield(indices, value):
                    self._sleep(peers, indices, value, what)
                break
        self.fence()

    def stop(self) -> None:
        """From any thread: leave the group. Others that wait for this rank are told, and a waiting thread of its own."""
        self._stopped = True
        fence = make_fence()
        fence()
        self._words[self._left[self._rank]] = 1
        fence()
        for asleep, address in self._sleepers.values():
            self._words[asleep] = 0
            futex_wake(address)

    def _yield(self, indices: Sequence[int], value: int) -> bool:
        """Whether they came before it was time to sleep."""
        words, looks, clock, end = self._words, self._looks, time.perf_counter, 0.0
        for index in indices:
            while words[index] < value:
                if looks > 0:
                    looks -= 1
                    continue
                now = clock()
                if not end:
                    end = now + self._spin
                elif now > end:
                    return False
                os.sched_yield()
        return True

    def _sleep(self, peers: Sequence[int], indices: Sequence[int], value: int, what: Callable[[], str]) -> None:
        words, asleep = self._words, self._asleep
        address = self._sleepers[self._rank][1]
        now = time.monotonic()
        deadline, next_check = now + self._timeout, now + SLICE_SECONDS
        try:
            while True:
                words[asleep] = 1
                lost = [p for p in peers if words[self._left[p]]]
                if now >= next_check:
                    lost += [p for p in peers if p not in lost and self._processes[p].has_ended()]
                    next_check = now + SLICE_SECONDS
                self.fence()  # whoever is lost may have come before
                missing = [p for p, index in zip(peers, indices, strict=True) if words[index] < value]
                if not missing:
                    return
                if self._stopped:
                    raise CommunicatorError(f"{self._who}: closed while {what()} was waiting")
                if any(p in missing for p in lost):
                    raise PeerLost(f"{self._who}: {what()} cannot end: {self._describe([p for p in lost if p in missing])}")
                if now >= deadline:
                    raise CommunicatorTimeout(
                        f"{self._who}: {what()} has waited {self._timeout:g} s for {self._describe(missing)}"
                    )
                futex_wait(address, 1, max(0.0, min(SLICE_SECONDS, deadline - now)))
                now = time.monotonic()
        finally:
            words[asleep] = 0

    def _describe(self, peers: Sequence[int]) -> str:
        def state(peer: int) -> str:
            pid = self._processes[peer].pid
            if self._processes[peer].has_ended():
                return f"rank {peer} (process {pid}, which has ended)"
            gone = ", which has failed or left the group" if self._words[self._left[peer]] else ""
            return f"rank {peer} (process {pid}{gone})"

        return ", ".join(state(peer) for peer in peers)
