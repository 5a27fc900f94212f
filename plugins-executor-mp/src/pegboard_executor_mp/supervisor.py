"""The process between an engine and its ranks: starts them, tells how each ended, and sees to it that all of them end.

It is fresh, has one thread and computes nothing, so ranks can be forked off it: the modules that it imports first serve all of
them. It stops the ranks when it is told to, and when the engine's process ends in whatever way, and removes what is left in
shared memory. The ranks die with it.

    python -m pegboard_executor_mp.supervisor CONTROL PLAN    (file descriptors)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Final

from pegboard_executor_mp import process, traces
from pegboard_executor_mp.start_plan import StartPlan, environment, load

TERM_SECONDS: Final = 1.0
"""How long a rank has between SIGTERM and SIGKILL."""
KILL_SECONDS: Final = 2.0
"""How long the kernel has to end a killed rank before we leave without it."""
_LOOK: Final = 1.0
"""Seconds between looks at the parent, for which no descriptor may speak: a process that it forked keeps ours open."""


def main() -> None:
    process.open_standard_descriptors()
    control, plan = socket.socket(fileno=int(sys.argv[1])), load(int(sys.argv[2]))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started us may have blocked some
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.set_title("pegboard-mp", "pegboard: supervisor of ranks")
    plan.enter()
    if not plan.spawn:
        _import(plan.preload)
    Supervisor(control, plan, int(sys.argv[2])).run()
    os._exit(0)


def _import(modules: tuple[str, ...]) -> None:
    """Only to save time: a rank that needs a module which cannot be imported will tell."""
    import pegboard_executor_mp.rank  # noqa: F401 - what every rank needs

    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:
                traceback.print_exc()
        except Exception:
            traceback.print_exc()


class Supervisor:
    """``run`` returns when no rank is left. Tells over ``control``, one JSON list per packet: ``["started", rank, pid]`` and
    ``["ended", rank, wait status]``. A packet from the other side holds the seconds of grace with which to stop."""

    def __init__(self, control: socket.socket, plan: StartPlan, plan_fd: int) -> None:
        self._control, self._plan, self._plan_fd = control, plan, plan_fd
        self._ranks: dict[int, int] = {}
        """Pid to rank, of those that run."""
        self._pids: list[int] = []
        self._lines: list[int] = []
        """Write ends of pipes, one per rank, which end when it is to end."""
        self._told: float | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_term)
        self._poll.register(self._control, select.POLLIN)
        try:
            for rank in range(len(self._plan.hello)):
                self._start(rank)
            grace = self._until_told()
            self._poll.unregister(self._control)
            self._stop(grace)
        finally:
            for pid in self._ranks:
                os.kill(pid, signal.SIGKILL)
            traces.remove(self._plan.rendezvous, self._plan.segment, self._pids)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        line, write_end = os.pipe2(os.O_CLOEXEC)
        me = os.getpid()
        with (
            warnings.catch_warnings()
        ):  # of threads: a library may have some, none has work, and ours is the only one of Python's
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._become(rank, line, [write_end, *self._lines], me)
        os.close(line)
        os.close(self._plan.hello[rank])
        self._lines.append(write_end)
        self._ranks[pid] = rank
        self._pids.append(pid)
        self._tell("started", rank, pid)

    def _become(self, rank: int, line: int, others: list[int], parent: int) -> None:
        """In the forked process; does not return."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for fd in (self._control.detach(), self._wake_read, self._wake_write, *others, *self._plan.hello[rank + 1 :]):
                os.close(fd)
            hello = self._plan.hello[rank]
            if self._plan.spawn:
                for fd in (self._plan_fd, self._plan.boot, hello, line):
                    os.set_inheritable(fd, True)
                flags = sys.orig_argv[1 : sys.orig_argv.index("-m")]
                numbers = map(str, (rank, parent, self._plan_fd, hello, line))
                command = [sys.executable, *flags, "-m", "pegboard_executor_mp.rank", *numbers]
                os.execve(sys.executable, command, environment(self._plan.sys_path))
            from pegboard_executor_mp.rank import run

            status = run(rank, self._plan, parent=parent, hello=hello, line=line)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _until_told(self) -> float:
        """Seconds of grace."""
        while self._told is None:
            self._sleep(_LOOK)
            self._reap()
            if os.getppid() != self._plan.parent:
                self._told = self._plan.grace
        return self._told

    def _sleep(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(1000 * seconds):
            if fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 512)
            else:
                packet = b""
                with contextlib.suppress(OSError):
                    packet = self._control.recv(64)
                self._told = float(packet) if packet else self._plan.grace

    def _on_term(self, *_: object) -> None:
        self._told = self._plan.grace

    def _reap(self) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._tell("ended", rank, status)

    def _tell(self, *what: object) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, or does not listen
            self._control.send(json.dumps(what).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _stop(self, grace: float) -> None:
        for fd in self._lines:
            os.close(fd)
        for number, seconds in ((0, grace), (signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            for pid in self._ranks:  # they can be signalled until they are reaped
                os.kill(pid, number)
            until = time.monotonic() + seconds
            while self._ranks and (left := until - time.monotonic()) > 0:
                self._sleep(min(left, _LOOK))
                self._reap()


if __name__ == "__main__":
    main()
