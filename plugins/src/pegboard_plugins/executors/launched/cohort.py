"""Cohort: the ranks of one engine as one of them sees them, and its own worker among them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import cloudpickle

from pegboard.contracts.communicator import CommunicatorError
from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard_plugins.communicators.peers import Process, this_host
from pegboard_plugins.communicators.rendezvous import Pauses
from pegboard_plugins.executors.failure import Failure
from pegboard_plugins.executors.launched.calls import Begun, Call, Calls, Decided, Done, again
from pegboard_plugins.executors.launched.connections import Connections
from pegboard_plugins.executors.launched.folder import remove_folder
from pegboard_plugins.executors.launched.meeting import Peer
from pegboard_plugins.executors.launched.points import DriftError, Point, ranks_text
from pegboard_plugins.executors.worker_thread import WorkerThread

log = logging.getLogger(__name__)

_VERDICT_SECONDS: Final = 2.0
"""How long a rank whose peer was lost in the middle of an operation waits to hear what has become of it."""
_END_SECONDS: Final = 1.0
"""How long a process may take to end after it has closed its connections."""


class Failed(NamedTuple):
    """A rank's executor has failed for good."""

    drifted: bool
    why: str


class Left(NamedTuple):
    """A rank has shut its engine down. ``why``: what it waited for, in words."""

    why: str


class Ask(NamedTuple):
    """Whether a rank's worker is well."""

    number: int


class Tell(NamedTuple):
    number: int
    error: Any
    """The arguments of a ``WorkerError``, or None."""


class _Question:
    """One ``check_health``: the ranks that have not answered it yet."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self.future: Future[None] = Future()

    def end(self, error: BaseException | None) -> None:
        if not self.future.done():
            self.future.set_result(None) if error is None else self.future.set_exception(error)


class Cohort:
    """Holds no reference to the executor, which may be forgotten meanwhile. ``listen`` begins to hear the others."""

    def __init__(self, rank: int, size: int, peers: Mapping[int, Peer]) -> None:
        self.rank, self.size = rank, size
        self.failure = Failure()
        self.folder = ""
        """The rendezvous folder, which is removed at the end however that comes about."""
        self.kept: list[Any] = []
        """What must live as long as this."""
        self.thread = WorkerThread(rank)
        self.check: Callable[[], None] = lambda: None
        """Says on the worker's thread whether it is well."""
        self._owner = os.getpid()
        self._peers = peers
        self._gone: dict[int, str] = {}
        """Ranks of which nothing more will come, and why."""
        self._connections = Connections(peers)
        self._calls = Calls(rank, size, self._connections.send, self.fail)
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stopped = False

    def listen(self) -> None:
        self._connections.start(self)

    # -- what all ranks do together ----------------------------------------------------------------------------------

    def gather(self, what: str, value: Any) -> Future[list[Any]]:
        """The values of all ranks, in rank order."""
        return self._begin(Point(what, {}), value=value, finish=lambda values: [values[rank] for rank in range(self.size)])

    def call(
        self, point: Point, function: Callable[[], Any], ranks: Sequence[int], limit: float | None = None
    ) -> Future[list[Any]]:
        """``function`` on the worker's thread of ``ranks``; what it returns travels pickled. ``limit``: seconds, for all."""

        def finish(answers: dict[int, Any]) -> list[Any]:
            return [answers[rank] if rank == self.rank else _unpacked(answers[rank], rank) for rank in ranks]

        run = functools.partial(self._run, function, cloudpickle.dumps) if self.rank in ranks else None
        return self._begin(point, asked=ranks, run=run, finish=finish, limit=limit, limit_is_common=True)

    def step(
        self,
        point: Point,
        function: Callable[[], Any],
        told: Callable[[Any], Any],
        finish: Callable[[dict[int, Any]], Any],
        limit: float | None,
    ) -> Future[Any]:
        """``function`` on the worker's thread of every rank. ``told``: what the others hear of its result; ``finish`` gets that
        of the others and this rank's own result. One that overruns ``limit`` is fatal."""
        run = functools.partial(self._run, function, told)
        return self._begin(point, asked=range(self.size), run=run, finish=finish, limit=limit)

    def _begin(self, point: Point, **how: Any) -> Future[Any]:
        if self.thread.is_current and self.size > 1:
            raise RuntimeError(f"{point.what}: a worker's method cannot call all ranks, for whose workers it would wait itself")
        call = self._calls.begin(point, **how)
        if how.get("limit") is not None:
            self._connections.wake()  # so that it sees the time limit
        for rank, why in list(self._gone.items()):
            self._miss(rank, why)
        return call.future

    def _run(self, function: Callable[[], Any], told: Callable[[Any], Any], call: Call) -> None:
        with contextlib.suppress(ExecutorFailed):  # the end of everything ends the call as well
            self.thread.submit(functools.partial(self._answer, function, told, call))

    def _answer(self, function: Callable[[], Any], told: Callable[[Any], Any], call: Call) -> None:
        try:
            result = function()
            news = told(result) if self.size > 1 else None
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: they end the call, not the thread
            if isinstance(error, CommunicatorError):
                futures.wait((call.future,), _VERDICT_SECONDS)  # a symptom, where another rank has failed or was lost
            self._calls.answer(call, None, None, WorkerError.of(self.rank, error))
        else:
            self._calls.answer(call, result, news, None)

    # -- health, of which no other rank need know ----------------------------------------------------------------------

    def check_health(self, timeout: float) -> None:
        """Ask every worker, in between its calls. Raises ``WorkerError`` of one that is not well, ``ExecutorFailed`` where one
        does not answer within ``timeout`` seconds."""
        self._calls.check_open()
        number, question = next(self._numbers), _Question(set(range(self.size)))
        with self._lock:
            self._questions[number] = question
        try:
            self._connections.send(Ask(number))
            self._ask_worker(lambda error: self._take_told(self.rank, Tell(number, error)))
            for rank, why in list(self._gone.items()):
                raise ExecutorFailed(f"rank {rank} {why}")
            question.future.result(timeout)
        except TimeoutError:
            raise ExecutorFailed(f"check_health: no answer from {ranks_text(question.missing)} within {timeout} s") from None
        finally:
            with self._lock:
                del self._questions[number]

    def _ask_worker(self, tell: Callable[[Any], None]) -> None:
        def answered(future: Future[Any]) -> None:
            error = future.exception()
            tell(None if error is None else _told(self.rank, error))

        try:
            self.thread.submit(self.check).add_done_callback(answered)
        except ExecutorFailed as refused:
            tell(_told(self.rank, refused))

    def _take_told(self, rank: int, told: Tell) -> None:
        with self._lock:
            question = self._questions.get(told.number)
            if question is not None:
                question.missing.discard(rank)
                if told.error is not None:
                    question.end(WorkerError(*told.error))
                elif not question.missing:
                    question.end(None)

    # -- what is heard: on the thread of the connections -----------------------------------------------------------------

    def hear(self, rank: int, message: Any) -> None:
        match message:
            case Begun() | Done() | Decided():
                self._calls.hear(rank, message)
            case Ask(number):
                self._ask_worker(lambda error: self._connections.send(Tell(number, error), rank))
            case Tell():
                self._take_told(rank, message)
            case Failed(drifted, why):
                self.fail(DriftError(why) if drifted else ExecutorFailed(f"rank {rank}: {why}"))
            case Left(why):
                self._miss(rank, f"has shut its engine down{why}")

    def lose(self, rank: int) -> None:
        if rank in self._gone or self._stopped:
            return
        peer = self._peers[rank]
        ended = _ends(peer.process)
        self._gone[rank] = f"({peer}) {'has ended' if ended else 'has closed its connection, or its host has vanished'}"
        self.fail(ExecutorFailed(f"rank {rank} {self._gone[rank]}"))

    def look(self) -> float | None:
        self._calls.expire()
        return self._calls.seconds_left()

    def _miss(self, rank: int, why: str) -> None:
        """A rank that has left in good order is only missed by who still waits for it."""
        self._gone[rank] = why
        waiting = self._calls.oldest(rank)
        if waiting is not None:
            self.fail(ExecutorFailed(f"rank {rank} {why}, and rank {self.rank} waits for it: {waiting.what}"))

    def waits_for(self) -> str:
        waiting = self._calls.oldest()
        return "" if waiting is None else ranks_text(waiting.ranks)

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, cause: BaseException) -> None:
        """For good: every call ends, the other ranks and whoever wants to know are told."""
        if not self._stopped:
            self.failure.happen(cause, functools.partial(self._give_up, cause))

    def _give_up(self, cause: BaseException) -> None:
        log.error("rank %d: the executor has failed: %s", self.rank, cause)
        text = str(cause) if isinstance(cause, ExecutorFailed) else f"the executor has failed: {cause}"
        refusal = cause if isinstance(cause, ExecutorFailed) else ExecutorFailed(text)
        if refusal is not cause:
            refusal.__cause__ = cause
        self._connections.send(Failed(isinstance(cause, DriftError), text))
        self._refuse(refusal)
        remove_folder(self.folder)

    def _refuse(self, refusal: ExecutorFailed) -> None:
        self._calls.refuse(refusal)
        self.thread.refuse(str(refusal))
        with self._lock:
            for question in self._questions.values():
                question.end(again(refusal))

    def stop(self) -> None:
        """Leave the others and nothing behind, in bounded time. Idempotent. In a process forked off this one it does nothing."""
        if os.getpid() != self._owner or self._stopped:
            return
        self._stopped = True
        waiting = self._calls.oldest()
        self._refuse(ExecutorFailed("the executor was shut down"))
        self._connections.send(Left("" if waiting is None else f", with {waiting}"))
        self.thread.stop()
        self._connections.close()
        self.kept.clear()
        remove_folder(self.folder)


def _ends(process: Process) -> bool:
    """Its connections close some time before a process has ended. Of one on another host nothing is known."""
    pauses = Pauses(time.monotonic() + (_END_SECONDS if process.host == this_host() else 0.0))
    while not process.has_ended():
        if pauses.over():
            return False
    return True


def _told(rank: int, error: BaseException) -> Any:
    """``error`` as the arguments of a ``WorkerError``."""
    return (error if isinstance(error, WorkerError) else WorkerError.of(rank, error)).__reduce__()[1]


def _unpacked(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise WorkerError.of(rank, error) from error
