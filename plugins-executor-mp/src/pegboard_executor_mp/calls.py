"""Calls that wait for replies, by number. Every call ends exactly once: with its replies, an error, a time-out or the end."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from pegboard.contracts.executor import ExecutorFailed

log = logging.getLogger(__name__)


class Call:
    """One call under way. ``ranks``: those that were asked, in the order of the replies."""

    __slots__ = ("answer", "future", "id", "missing", "name", "ranks", "replies", "started")

    def __init__(self, number: int, name: str, ranks: Sequence[int], answer: int | None) -> None:
        self.id, self.name, self.ranks, self.answer = number, name, ranks, answer
        self.missing = set(ranks)
        self.replies: dict[int, Any] = {}
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # it is on its way, nobody can call it back
        self.started = time.monotonic()

    def result(self) -> Any:
        """The reply of ``answer``, or all of them in order."""
        return self.replies[self.answer] if self.answer is not None else [self.replies[rank] for rank in self.ranks]

    def waits_for(self) -> str:
        return ranks_text(self.missing)


class Calls:
    """Thread-safe, and a signal's handler or a finalizer may come in between. Futures complete under the lock: so two calls
    complete in the order in which their last replies came, and a done-callback must not wait for another call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._refusal: ExecutorFailed | None = None

    def begin(self, name: str, ranks: Sequence[int], answer: int | None) -> Call:
        """Raises ``ExecutorFailed`` after ``refuse``."""
        with self._lock:
            if self._refusal is not None:
                raise again(self._refusal)
            call = Call(next(self._numbers), name, ranks, answer)
            self._open[call.id] = call
        return call

    def reply(self, number: int, rank: int, value: Any) -> None:
        """Late and unknown ones are dropped."""
        with self._lock:
            call = self._open.get(number)
            if call is None:
                return
            call.replies[rank] = value
            call.missing.discard(rank)
            if not call.missing and self._open.pop(number, None) is not None:
                call.future.set_result(call.result())

    def fail(self, number: int, error: BaseException) -> bool:
        """End one call early; whatever still comes for it is dropped. False: it has ended already."""
        with self._lock:
            call = self._open.pop(number, None)
            if call is None or call.future.done():
                return False
            call.future.set_exception(error)
            return True

    def refuse(self, refusal: ExecutorFailed) -> list[Call]:
        """End all calls with ``refusal`` and take no more. The first refusal stays. Returns the calls that it ended."""
        with self._lock:
            self._refusal = self._refusal or refusal
            ended = list(self._open.values())
            for call in ended:  # after an interrupt in here the next ``refuse`` goes on where this one was
                if not call.future.done():
                    call.future.set_exception(again(self._refusal))
                self._open.pop(call.id, None)
        return ended

    def shut_down(self, step_timeout: float | None) -> bool:
        """End all calls because the executor ends, and take no more. True if one of them had waited for ``step_timeout``: ranks
        that hang need no time to end by themselves."""
        hung = False
        for call in self.refuse(ExecutorFailed("the executor was shut down")):
            age = time.monotonic() - call.started
            log.info("%s: shut down before there was an answer from %s, after %.1f s", call.name, call.waits_for(), age)
            if step_timeout is not None and age >= step_timeout:
                hung = True
                log.error("%s: no answer from %s for %.1f s, which counts as hung", call.name, call.waits_for(), age)
        return hung

    def oldest(self) -> Call | None:
        """Of those that are open."""
        with self._lock:
            return next(iter(self._open.values()), None)

    def is_open(self, number: int) -> bool:
        return number in self._open


class Deadline:
    """``seconds`` from when it was made, None: never."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds, and no more than Python's locks can wait for; None: for ever."""
        return None if self._end is None else min(max(0.0, self._end - time.monotonic()), threading.TIMEOUT_MAX)


def ranks_text(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def again(error: ExecutorFailed) -> ExecutorFailed:
    """One exception per raise: tracebacks of several threads do not get mixed up."""
    copy = ExecutorFailed(*error.args)
    copy.__cause__ = error.__cause__
    return copy
