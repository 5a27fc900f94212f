"""The ranks of one engine as its own process sees them: their processes, their queues, and the threads that listen."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard.contracts.transport import Closed, Reader
from pegboard.plugins import Composition
from pegboard.wire import World
from pegboard_executor_mp import launch, traces
from pegboard_executor_mp.calls import Calls, Deadline, ranks_text
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.monitor import Monitor
from pegboard_executor_mp.options import Options
from pegboard_executor_mp.queue import MessageQueue, attach
from pegboard_executor_mp.replies import take_replies
from pegboard_executor_mp.start_plan import Hello
from pegboard_executor_mp.supervisor import KILL_SECONDS, TERM_SECONDS

log = logging.getLogger(__name__)

VERDICT_SECONDS: Final = 5.0
"""How long to wait for the report on a process that has ended, which takes milliseconds."""
HURRIED_SECONDS: Final = 1.0
"""Of grace for the ranks that are left when one is lost."""
_MARGIN: Final = 5.0


class Fleet:
    """Made started; ``greet`` then waits for the ranks. Holds no reference to the executor, which may be forgotten meanwhile."""

    def __init__(self, composition: Composition, options: Options, world: World, calls: Calls, failure: Failure) -> None:
        self._owner = os.getpid()
        self._step_timeout = composition.config.executor.step_timeout
        self._options, self._world, self._calls, self._failure = options, world, calls, failure
        self.hurry = False
        """Give the ranks no time to end by themselves: what they wait for may never come."""
        self._readers: list[Reader] = []
        self._threads: list[threading.Thread] = []
        self.requests = MessageQueue.create(
            world.size, chunk_bytes=options.chunk_bytes, num_chunks=options.num_chunks, setting=launch.SETTINGS
        )
        handles = [self.requests.handle(rank) for rank in range(world.size)]
        assert handles[0].segment is not None
        self._segment, self._rendezvous = handles[0].segment, traces.make_rendezvous()
        try:
            self._launch = launch.launch(composition, options, world, self._rendezvous, handles, self._segment)
        except BaseException:
            self.requests.close()
            traces.remove(self._rendezvous, self._segment, ())
            raise
        self._monitor = Monitor(self._launch.control, self._launch.supervisor, self.fail)
        self._thread("monitor", self._watch)

    def greet(self, deadline: Deadline) -> None:
        """Until all ranks have their worker. Raises the ``WorkerError`` of one that has not, ``ExecutorFailed`` for one that
        ended, ``TimeoutError``."""
        said = dict.fromkeys(self._launch.hello, b"")
        poll = select.poll()
        for rank in said:
            poll.register(self._launch.hello[rank], select.POLLIN)
        ranks = {fd: rank for rank, fd in self._launch.hello.items()}
        while said:
            ready = poll.poll(deadline.milliseconds())
            if not ready:
                raise TimeoutError(f"no sign of {ranks_text(said)} within {deadline.seconds} s")
            for fd, _ in ready:
                piece, rank = os.read(fd, 1 << 16), ranks[fd]
                said[rank] += piece
                if not piece:
                    poll.unregister(fd)
                    os.close(self._launch.hello.pop(rank))
                    self._greeted(rank, said.pop(rank))
        try:
            self.requests.wait_ready(VERDICT_SECONDS)
        except Closed:
            self.raise_verdict("a rank has ended as soon as it was ready")

    def _greeted(self, rank: int, data: bytes) -> None:
        try:
            hello: Hello = pickle.loads(data)
            reader = None if hello.replies is None else attach(hello.replies)
        except (EOFError, pickle.UnpicklingError, Closed):  # it said nothing, or half of it, or was gone at once
            self.raise_verdict(f"worker rank {rank} has ended before it was ready")
        if reader is None:
            raise WorkerError(*hello.error)
        self._readers.append(reader)
        self._thread(f"replies-{rank}", take_replies, rank, reader, self._calls, self._before_error)

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

    def _before_error(self, rank: int) -> None:
        """An error of one rank may come of the end of another one: then let that be told first."""
        if any(other != rank and has_ended(pid) for other, pid in list(self._monitor.pids.items())):
            self._failure.wait(VERDICT_SECONDS)

    def _watch(self) -> None:
        self._monitor.run()
        self._remove_traces()  # which the supervisor has done, unless it was killed

    def _remove_traces(self) -> None:
        traces.remove(self._rendezvous, self._segment, self._monitor.pids.values())

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"pegboard-mp-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- the end -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything and leave nothing, in bounded time. Idempotent. In a process forked off this one it does nothing."""
        if os.getpid() != self._owner:
            return
        self.hurry = self.hurry or self._failure.cause is not None
        self._failure.close()
        for call in self._calls.refuse(ExecutorFailed("the executor was shut down")):
            age = time.monotonic() - call.started
            log.info("%s: shut down before there was an answer from %s, after %.1f s", call.name, call.waits_for(), age)
            if self._step_timeout is not None and age >= self._step_timeout:
                self.hurry = True
                log.error("%s: no answer from %s for %.1f s, which counts as hung", call.name, call.waits_for(), age)
        grace = min(HURRIED_SECONDS, self._options.shutdown_timeout) if self.hurry else self._options.shutdown_timeout
        self.requests.cancel()
        self._tell_to_stop(grace)
        try:
            self._launch.supervisor.wait(grace + TERM_SECONDS + KILL_SECONDS + _MARGIN)
        except BaseException as error:  # also a second Ctrl-C
            self._launch.supervisor.kill()  # the ranks die with it
            self._launch.supervisor.wait(_MARGIN)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.requests.close()
        for reader in self._readers:
            reader.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MARGIN)
        self._launch.control.close()
        for fd in self._launch.hello.values():
            os.close(fd)
        self._remove_traces()

    def _tell_to_stop(self, grace: float) -> None:
        with contextlib.suppress(OSError):  # it has ended, or was told before
            self._launch.control.send(str(grace).encode())


def has_ended(pid: int) -> bool:
    """Also true for a process that nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True
