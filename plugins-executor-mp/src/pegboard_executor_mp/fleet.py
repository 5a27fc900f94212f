"""The ranks of one engine as its own process sees them: their processes, their queues, and the threads that listen."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn

from pegboard.contracts.communicator import PeerLost
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.contracts.transport import Closed, Reader
from pegboard.plugins import Composition
from pegboard.wire import World
from pegboard_executor_mp import launch, traces
from pegboard_executor_mp.calls import Calls, Deadline, ranks_text
from pegboard_executor_mp.failure import VERDICT_SECONDS, Failure
from pegboard_executor_mp.monitor import Monitor
from pegboard_executor_mp.options import Options
from pegboard_executor_mp.queue import MessageQueue, attach
from pegboard_executor_mp.replies import take_replies
from pegboard_executor_mp.start_plan import Hello
from pegboard_executor_mp.supervisor import KILL_SECONDS, TERM_SECONDS

log = logging.getLogger(__name__)

HURRIED_SECONDS: Final = 1.0
"""Of grace for the ranks that are left when one is lost."""
_MARGIN: Final = 5.0
_LOOK: Final = 0.5
"""Seconds between looks whether a rank that says nothing has ended: a process forked meanwhile keeps its pipe open."""


class Fleet:
    """``start`` it, ``greet`` the ranks, ``stop`` it at whatever point. Holds no reference to the executor, which may be
    forgotten meanwhile."""

    def __init__(self, options: Options, world: World, step_timeout: float | None, calls: Calls, failure: Failure) -> None:
        self._owner = os.getpid()
        self._step_timeout = step_timeout
        self._options, self._world, self._calls, self._failure = options, world, calls, failure
        self.hurry = False
        """Give the ranks no time to end by themselves: what they wait for may never come."""
        self._readers: list[Reader] = []
        self._threads: list[threading.Thread] = []
        self.requests = MessageQueue.create(
            world.size, chunk_bytes=options.chunk_bytes, num_chunks=options.num_chunks, setting=launch.SETTINGS
        )
        segment = self.requests.handle(0).segment
        assert segment is not None
        self._segment, self._rendezvous = segment, ""
        self._launch: launch.Launch | None = None
        self._pids: dict[int, int] = {}
        """Rank to pid, of those that have started."""

    def start(self, composition: Composition) -> None:
        """Raises ``PluginError`` for plugins that cannot be sent, ``EngineStartError`` where no interpreter can be started."""
        handles = [self.requests.handle(rank) for rank in range(self._world.size)]
        self._rendezvous = traces.make_rendezvous()
        self._launch = launch.launch(composition, self._options, self._world, self._rendezvous, handles, self._segment)
        monitor = Monitor(self._launch.control, self._launch.supervisor, self.fail)
        self._pids = monitor.pids
        self._thread("monitor", self._watch, monitor)

    def greet(self, deadline: Deadline) -> None:
        """Until all ranks have their worker. Raises the ``WorkerError`` of one that has not, ``ExecutorFailed`` for one that
        ended, ``TimeoutError``."""
        assert self._launch is not None
        hello = self._launch.hello
        said = dict.fromkeys(hello, b"")
        poll = select.poll()
        for fd in hello.values():
            poll.register(fd, select.POLLIN)
        ranks = {fd: rank for rank, fd in hello.items()}
        while said:
            left = deadline.left()
            ready = poll.poll(1000 * (_LOOK if left is None else min(left, _LOOK)))
            if not ready and self._failure.cause is not None:
                self.raise_verdict("")
            if not ready and left == 0:
                raise TimeoutError(f"no sign of {ranks_text(said)} within {deadline.seconds} s")
            for fd, _ in ready:
                piece, rank = os.read(fd, 1 << 16), ranks[fd]
                said[rank] += piece
                told = Hello.unpack(said[rank])
                if told is not None or not piece:
                    poll.unregister(fd)
                    os.close(hello.pop(rank))
                    del said[rank]
                    self._greeted(rank, told)
        try:
            self.requests.wait_ready(VERDICT_SECONDS)
        except Closed:
            self.raise_verdict("a rank has ended as soon as it was ready")

    def _greeted(self, rank: int, told: Hello | None) -> None:
        if told is not None and told.replies is None:
            raise WorkerError(*told.error)
        try:
            if told is None or told.replies is None:
                raise Closed("it said nothing, or half of it")
            reader = attach(told.replies)
        except Closed:
            self.raise_verdict(f"worker rank {rank} has ended before it was ready")
        self._readers.append(reader)
        self._thread(f"replies-{rank}", self._take_replies, rank, reader)

    # -- while they run ------------------------------------------------------------------------------------------------

    def raise_verdict(self, otherwise: str) -> NoReturn:
        """Raise what the executor has failed of, as soon as that is known; ``ExecutorFailed(otherwise)`` if it never is."""
        self._failure.wait(VERDICT_SECONDS)
        raise ExecutorFailed(f"{self._failure.cause or otherwise}") from self._failure.cause

    def fail(self, cause: BaseException) -> None:
        """For good: every call ends, whoever wants to know is told, the ranks are stopped."""
        self._failure.happen(cause, self._give_up)

    def _give_up(self, refusal: ExecutorFailed) -> None:
        self._calls.refuse(refusal)
        self.requests.cancel()
        self._tell_to_stop(min(HURRIED_SECONDS, self._options.shutdown_timeout))

    def _before_error(self, error: WorkerError) -> None:
        """An error of one rank may come of the end of another one, or of its error: then let that be told first."""
        lost = error.error_type == PeerLost.__name__
        if lost or any(other != error.rank and has_ended(pid) for other, pid in list(self._pids.items())):
            self._failure.wait(VERDICT_SECONDS)

    def _take_replies(self, rank: int, reader: Reader) -> None:
        """The target of a thread. When it returns nobody takes replies of ``rank`` any more, so then the executor has ended."""
        try:
            take_replies(rank, reader, self._calls, self._before_error)
        except BaseException as error:  # out of memory, for one
            log.exception("replies of rank %d cannot be taken", rank)
            self.fail(ExecutorFailed(f"replies of worker rank {rank} cannot be taken: {type(error).__name__}: {error}"))
        else:
            if not self._failure.wait(VERDICT_SECONDS):  # its end would have been told by now
                self.fail(ExecutorFailed(f"worker rank {rank} (process {self._pids.get(rank)}) has left, but does not end"))

    def _watch(self, monitor: Monitor) -> None:
        monitor.run()
        self._remove_traces()  # which the supervisor has done, unless it was killed

    def _remove_traces(self) -> None:
        traces.remove(self._rendezvous, self._segment, self._pids.values())

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"pegboard-mp-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything and leave nothing, in bounded time. Idempotent. In a process forked off this one it does nothing."""
        try:
            self._end()
        except BaseException:  # a signal's handler, as for a second Ctrl-C: nobody waits any longer
            if self._launch is not None:
                self._launch.supervisor.kill()  # the ranks die with it
            self._end()
            raise

    def _end(self) -> None:
        """Each step may be taken again."""
        if os.getpid() != self._owner:
            return
        self.hurry = self.hurry or self._failure.cause is not None
        self._failure.close()
        self.hurry = self._calls.shut_down(self._step_timeout) or self.hurry
        grace = min(HURRIED_SECONDS, self._options.shutdown_timeout) if self.hurry else self._options.shutdown_timeout
        self._tell_to_stop(grace)
        self.requests.cancel()
        if self._launch is not None:
            self._await(self._launch.supervisor, grace + TERM_SECONDS + KILL_SECONDS + _MARGIN)
        self.requests.close()
        for reader in self._readers:
            reader.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MARGIN)
        if self._launch is not None:
            self._launch.close()
        self._remove_traces()

    @staticmethod
    def _await(supervisor: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(_MARGIN)

    def _tell_to_stop(self, grace: float) -> None:
        if self._launch is not None:
            with contextlib.suppress(OSError):  # it has ended, or was told before
                self._launch.control.send(str(grace).encode())


def has_ended(pid: int) -> bool:
    """Also true for a process that nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
