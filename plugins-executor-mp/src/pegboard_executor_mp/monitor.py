"""Hears from the supervisor which processes have started and ended, and says so when that was not meant to be."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Final

from pegboard.contracts.executor import ExecutorFailed

log = logging.getLogger(__name__)

_HINTS = {
    signal.SIGKILL: " (as the kernel does when memory runs out)",
    signal.SIGBUS: " (as happens when shared memory or a mapped file runs out)",
    signal.SIGILL: " (an instruction that this processor lacks)",
    signal.SIGSEGV: " (a fault in native code; its Python stack is in the log)",
    signal.SIGABRT: " (native code gave up; its message is in the log)",
}

_LOOK: Final = 1.0
"""Seconds between looks whether the supervisor has ended."""

_END_SECONDS: Final = 5.0
"""How long a process may take to end after it has closed what it held."""


class Monitor:
    """``run`` is the target of a thread; it returns when the supervisor has ended. Knows no executor."""

    def __init__(
        self, control: socket.socket, supervisor: subprocess.Popen[bytes], lost: Callable[[BaseException], None]
    ) -> None:
        self.pids: dict[int, int] = {}
        """Rank to pid, of all that have started."""
        self._control, self._supervisor, self._lost = control, supervisor, lost
        control.settimeout(_LOOK)

    def run(self) -> None:
        while packet := self._receive():
            kind, rank, value = json.loads(packet)
            if kind == "started":
                self.pids[rank] = value
            else:
                pid = self.pids.get(rank, 0)
                log.debug("worker rank %d (process %d) %s", rank, pid, how_it_ended(value))
                self._lost(ExecutorFailed(f"worker rank {rank} (process {pid}) {how_it_ended(value)}"))
        who = f"the supervisor of the ranks (process {self._supervisor.pid})"
        self._lost(ExecutorFailed(f"{who} has ended, and the ranks with it"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(_END_SECONDS)

    def _receive(self) -> bytes:
        """The next packet; nothing once the supervisor has ended, also if a process forked meanwhile keeps its socket open."""
        while True:
            ended = self._supervisor.poll() is not None
            try:
                return self._control.recv(4096)
            except TimeoutError:
                if ended:
                    return b""
            except OSError:
                return b""


def how_it_ended(status: int) -> str:
    """``status``: as from ``os.waitpid``."""
    if not os.WIFSIGNALED(status):
        return f"ended with exit status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"was ended by signal {number}"
    return f"was ended by {known.name}{_HINTS.get(known, '')}"
