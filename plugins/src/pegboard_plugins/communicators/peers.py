"""Processes of a group's ranks: who they are, and whether they still run."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_STATE, _START_TIME = 0, 19
"""Fields of ``/proc/<pid>/stat`` after the name: the third and the twenty-second of proc(5)."""


class Process(NamedTuple):
    """A process id is used again; with the time at which it started (clock ticks after boot) it is not."""

    host: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        pid = os.getpid()
        stat = _stat(pid)
        return cls(this_host(), pid, int(stat[_START_TIME]) if stat else 0)

    def has_ended(self) -> bool:
        """Also for one that nobody has waited for. False where it cannot be known: on other hosts and without /proc."""
        if self.host != this_host() or not self.started:
            return False
        stat = _stat(self.pid)
        return not stat or int(stat[_START_TIME]) != self.started or stat[_STATE] in ("Z", "X")


@functools.cache
def this_host() -> str:
    """Equal for processes that share memory and see one another's process ids: the boot and the namespace of process ids."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> list[str]:
    """Empty if there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
