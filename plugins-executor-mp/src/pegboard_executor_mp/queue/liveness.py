"""Whether a process of this machine still runs: told apart by pid and start time, so a reused pid is not taken for it."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """``start``: clock ticks from boot to the start of the process (field 22 of ``/proc/PID/stat``)."""

    pid: int
    start: int

    @classmethod
    def current(cls) -> Process:
        pid = os.getpid()
        stat = _stat(pid)
        if stat is None:
            raise OSError("cannot read /proc/self/stat; the shared-memory queue needs /proc to tell whether its other end lives")
        return cls(pid, stat[1])

    def alive(self) -> bool:
        """A zombie counts as dead."""
        stat = _stat(self.pid)
        return stat is not None and stat == (True, self.start)


def _stat(pid: int) -> tuple[bool, int] | None:
    """(runs, start) of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0] not in (b"Z", b"X"), int(fields[19])


def pid_namespace() -> int:
    """Pids of different namespaces cannot be compared."""
    return os.stat("/proc/self/ns/pid").st_ino


class Watch:
    """Tells in about a microsecond which of several processes have ended: a pidfd becomes readable when its process ends,
    reaped or not. Kernels and sandboxes without pidfds fall back to reading ``/proc``."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        self._by_proc: dict[int, Process] = {}
        self._dead: set[int] = set()

    def add(self, key: int, process: Process) -> None:
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._dead.add(key)
            return
        except OSError:
            self._by_proc[key] = process
            return
        self._by_fd[fd] = key
        self._poll.register(fd, select.POLLIN)
        if not process.alive():  # looked at after the pidfd was opened: from here on it stands for this very process
            self._dead.add(key)

    def dead(self) -> set[int]:
        """Keys of the processes that have ended."""
        self._dead.update(self._by_fd[fd] for fd, _ in self._poll.poll(0))
        self._dead.update(key for key, process in self._by_proc.items() if not process.alive())
        return self._dead

    def close(self) -> None:
        for fd in self._by_fd:
            os.close(fd)
        self._by_fd.clear()
        self._by_proc.clear()
        self._poll = select.poll()
