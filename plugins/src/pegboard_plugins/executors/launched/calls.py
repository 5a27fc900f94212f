"""Calls that every rank makes: numbered alike on all, run when all have come to them, ended when those asked have answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

from pegboard.contracts.executor import ExecutorFailed, WorkerError
from pegboard_plugins.executors.launched.points import DriftError, Point, drift, ranks_text

_MARGIN: Final = 5.0
"""Seconds after which ranks but the first give up waiting for its word that a call is late."""


class Begun(NamedTuple):
    """A rank has come to a call. ``value``: what it brings along."""

    call: int
    point: Point
    value: Any


class Done(NamedTuple):
    """A rank has answered. ``error``: the arguments of a ``WorkerError``, or None."""

    call: int
    answer: Any
    error: Any


class Decided(NamedTuple):
    """Rank 0's word on a call with a common time limit: it ends with the answers, or for all ranks with this text."""

    call: int
    late: str | None


class Waiting(NamedTuple):
    """A call that waits: for whom, and since when in seconds."""

    what: str
    ranks: set[int]
    seconds: float

    def __str__(self) -> str:
        return f"no answer from {ranks_text(self.ranks)} for {self.seconds:.1f} s: {self.what}"


class Call:
    """``asked``: ranks whose answers it waits for; none: it ends with the values of all when all have begun."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.begun: dict[int, Begun] = {}
        self.answers: dict[int, Any] = {}
        self.error: WorkerError | None = None
        self.decision: Decided | None = None
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # other ranks count on it: it cannot be called back
        # the rest is known when this rank begins it
        self.since = 0.0
        self.asked: Sequence[int] = ()
        self.run: Callable[[Call], object] | None = None
        self.finish: Callable[[dict[int, Any]], Any] = dict
        self.limit: float | None = None
        self.limit_is_common = False
        self.deadline: float | None = None


class Calls:
    """One rank's book of calls. Thread-safe. Futures complete under the lock, in the order of the calls where nothing fails.

    ``send`` tells all other ranks; ``fail`` is told, without the lock, of what makes further calls useless.
    """

    def __init__(self, rank: int, size: int, send: Callable[[Any], None], fail: Callable[[BaseException], None]) -> None:
        self._rank, self._size, self._send, self._fail = rank, size, send, fail
        self._lock = threading.RLock()
        self._open: dict[int, Call] = {}
        self._next = 0
        self._refusal: ExecutorFailed | None = None
        self._fatal: BaseException | None = None

    def begin(
        self,
        point: Point,
        *,
        value: Any = None,
        asked: Sequence[int] = (),
        run: Callable[[Call], object] | None = None,
        finish: Callable[[dict[int, Any]], Any],
        limit: float | None = None,
        limit_is_common: bool = False,
    ) -> Call:
        """``run`` is called once all ranks have begun; ``finish`` makes the result of the answers, or of the values.

        ``limit``: seconds. If it is common, rank 0 decides for all whether it was kept; if not, exceeding it is fatal. Raises
        ``ExecutorFailed`` after ``refuse``.
        """
        with self._lock:
            self.check_open()
            number, self._next = self._next, self._next + 1
            call = self._open.setdefault(number, Call(number))
            call.asked, call.run, call.finish, call.since = asked, run, finish, time.monotonic()
            call.limit, call.limit_is_common = limit, limit_is_common and limit is not None
            if limit is not None:
                margin = _MARGIN if limit_is_common and self._rank > 0 else 0.0
                call.deadline = call.since + limit + margin
            begun = Begun(number, point, value)
            self._send(begun)
            self._take_begun(self._rank, call, begun)
        self._report()
        return call

    def answer(self, call: Call, answer: Any, told: Any, error: WorkerError | None) -> None:
        """This rank's answer, and what the others are ``told`` of it."""
        with self._lock:
            self._send(Done(call.number, told, None if error is None else error.__reduce__()[1]))
            if call.number in self._open:
                self._take_answer(self._rank, call, answer, error)
        self._report()

    def hear(self, rank: int, message: Begun | Done | Decided) -> None:
        with self._lock:
            call = self._open.get(message.call)
            if call is None:
                if message.call < self._next or self._refusal is not None:
                    return  # it is over
                call = self._open[message.call] = Call(message.call)
            match message:
                case Begun():
                    self._take_begun(rank, call, message)
                case Done(_, answer, error):
                    self._take_answer(rank, call, answer, None if error is None else WorkerError(*error))
                case Decided():
                    call.decision = message
                    self._settle(call)
        self._report()

    def check_open(self) -> None:
        """Raise what calls are refused with, if they are."""
        if self._refusal is not None:
            raise again(self._refusal)

    def refuse(self, refusal: ExecutorFailed) -> None:
        """End all calls with ``refusal`` and take no more. The first one stays."""
        with self._lock:
            self._refusal = self._refusal or refusal
            ended, self._open = list(self._open.values()), {}
            for call in ended:
                if not call.future.done():
                    call.future.set_exception(again(self._refusal))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """Until the next time limit; None where there is none."""
        with self._lock:
            ends = [call.deadline for call in self._waiting() if call.deadline is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def expire(self) -> None:
        """End the calls whose time is up. One whose limit is not common is fatal: then all end."""
        with self._lock:
            for call in [c for c in self._waiting() if c.deadline is not None and c.deadline <= time.monotonic()]:
                who, what = ranks_text(self._missing(call)), call.begun[self._rank].point.what
                late = f"{what}: no answer from {who} within {call.limit} s"
                if not call.limit_is_common:
                    self._fatal = self._fatal or TimeoutError(f"{late} (executor.step_timeout)")
                    continue
                if self._rank == 0:
                    call.decision = Decided(call.number, late)
                    self._send(call.decision)
                self._end(call, TimeoutError(late))
        self._report()

    def oldest(self, rank: int | None = None) -> Waiting | None:
        """The oldest call that waits (for ``rank``)."""
        with self._lock:
            for call in self._waiting():
                if rank is None or rank in self._owing(call):
                    return Waiting(call.begun[self._rank].point.what, self._missing(call), time.monotonic() - call.since)
        return None

    def _waiting(self) -> list[Call]:
        """Calls that this rank waits for, the oldest first."""
        return [c for _, c in sorted(self._open.items()) if self._rank in c.begun and not c.future.done()]

    def _owing(self, call: Call) -> set[int]:
        """Ranks that have not begun or not answered."""
        return {r for r in range(self._size) if r not in call.begun} | {r for r in call.asked if r not in call.answers}

    def _missing(self, call: Call) -> set[int]:
        """Those that hold it up: who has not begun keeps the others from answering. The first, where its decision is missing."""
        return {r for r in range(self._size) if r not in call.begun} or self._owing(call) or {0}

    def _report(self) -> None:
        """Without the lock: whoever is told may want to wait for others."""
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            self._fail(fatal)

    # -- progress, with the lock held ----------------------------------------------------------------------------------

    def _take_begun(self, rank: int, call: Call, begun: Begun) -> None:
        differs = any(begun.point != other.point for other in call.begun.values())
        call.begun[rank] = begun
        if differs:
            error = drift({r: b.point for r, b in call.begun.items()})
            self._end(call, error)
            self._fatal = self._fatal or error
            return
        if len(call.begun) == self._size and call.run is not None:
            call.run(call)
        self._settle(call)

    def _take_answer(self, rank: int, call: Call, answer: Any, error: WorkerError | None) -> None:
        call.answers[rank] = answer
        call.error = call.error or error
        self._settle(call)

    def _settle(self, call: Call) -> None:
        """End the call if it can: with its first error, without waiting for ranks that may hang because of it. It is forgotten
        when nothing more will come: a call that is over for this rank still runs as on the others."""
        if self._rank not in call.begun:
            return
        answered = len(call.begun) == self._size and len(call.answers) == len(call.asked)
        if call.future.done():
            pass
        elif call.decision is not None and call.decision.late is not None:
            self._end(call, TimeoutError(call.decision.late))
        elif answered or call.error is not None:
            if call.limit_is_common and call.decision is None and self._size > 1:
                if self._rank > 0:
                    return
                call.decision = Decided(call.number, None)
                self._send(call.decision)
            self._conclude(call)
        if answered:
            self._open.pop(call.number, None)

    def _conclude(self, call: Call) -> None:
        if call.error is not None:
            self._end(call, call.error)
            return
        try:
            result = call.finish(call.answers if call.asked else {rank: begun.value for rank, begun in call.begun.items()})
        except BaseException as error:  # an answer that cannot be read here, or answers that differ
            self._end(call, error)
            if isinstance(error, DriftError):
                self._fatal = self._fatal or error
        else:
            call.future.set_result(result)

    def _end(self, call: Call, error: BaseException) -> None:
        if not call.future.done():
            call.future.set_exception(error)


def again(error: ExecutorFailed) -> ExecutorFailed:
    """One exception per raise: tracebacks of several threads do not get mixed up."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
