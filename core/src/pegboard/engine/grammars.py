"""GrammarManager: requests that wait for their grammar, and the states of those that have it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from pegboard.contracts.grammar import Grammar, GrammarBackend, GrammarState, GrammarStates
from pegboard.engine.grammar_compiler import GrammarCompiler, Job
from pegboard.wire import EngineCoreRequest, GrammarOutput, GrammarSpec

log = logging.getLogger(__name__)


class Ready(NamedTuple):
    """A request that waits no longer: its state is begun, or ``error`` says why it cannot be served."""

    request: EngineCoreRequest
    error: str | None


@dataclass(slots=True)
class _Waiting:
    """``deadline``: by the monotonic clock. At the end it has ``state`` or ``error``."""

    request: EngineCoreRequest
    job: Job
    deadline: float
    state: GrammarState | None = None
    error: str | None = None


@dataclass(slots=True)
class _Running:
    """``failure``: why the request cannot go on, found when its mask was to be computed."""

    spec: GrammarSpec
    state: GrammarState
    stop_token_ids: Sequence[int]
    failure: str | None = None


class GrammarManager(GrammarStates):
    """A request enters with ``enqueue``, and ``take_ready`` gives it back when it has its grammar. It leaves with ``drop`` while
    it waits, with ``forget`` afterwards.

    What a grammar raises ends the request that has it, and no other: where a mask cannot be computed every token is allowed in
    that step but those that end the request, and ``accept`` tells the scheduler what happened. Called from one thread, but for
    ``close``.
    """

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        vocab_size: int,
        *,
        num_threads: int = 2,
        timeout: float = 30.0,
        agree: Callable[[Mapping[str, str | None]], Mapping[str, str | None]] | None = None,
    ) -> None:
        """``make_backend`` is called when the first grammar is compiled. ``timeout``: seconds that a request waits at most.

        ``agree``: of the requests whose wait is over here, with None or why they cannot be served, makes those for which that
        holds (see ``Lockstep.outcomes``). It is then asked whenever any wait, and what waits must not depend on time.
        """
        self._compiler = GrammarCompiler(make_backend, num_threads)
        self._row_bytes = 4 * -(-vocab_size // 32)
        self._timeout, self._agree = timeout, agree
        self._waiting: dict[str, _Waiting] = {}  # in the order of deadlines
        self._running: dict[str, _Running] = {}
        self._news = threading.Event()
        self.close = self._compiler.close
        """End the threads. Idempotent."""

    # -- requests that wait ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enqueue(self, request: EngineCoreRequest) -> None:
        """Have its grammar compiled, unless that is done or under way."""
        assert request.grammar is not None
        job, news = self._compiler.submit(request.grammar), self._news
        self._waiting[request.request_id] = _Waiting(request, job, time.monotonic() + self._timeout)
        job.result.add_done_callback(lambda _: news.set())  # at once where it is done

    def take_ready(self) -> list[Ready]:
        """Requests whose grammar is compiled, or cannot be, or not in time."""
        if not self._waiting:
            return []
        if self._agree is None and not (self._news.is_set() or self._first_deadline() <= time.monotonic()):
            return []
        self._news.clear()
        now = time.monotonic()
        over = {request_id: waiting.error for request_id, waiting in self._waiting.items() if self._is_over(waiting, now)}
        if self._agree is not None:
            over = dict(self._agree(over))
        return [self._leave(request_id, over[request_id]) for request_id in list(self._waiting) if request_id in over]

    def wait(self, seconds: float) -> None:
        """Return when a request may be ready, at the latest after ``seconds``; at once when none waits."""
        if self._waiting:
            self._news.wait(max(0.0, min(seconds, self._first_deadline() - time.monotonic())))

    def drop(self, request_ids: Iterable[str] | None) -> list[str]:
        """End requests that wait (None: all). Returns the ids of those that did."""
        ids = list(self._waiting) if request_ids is None else list(dict.fromkeys(request_ids))
        dropped = [request_id for request_id in ids if request_id in self._waiting]
        for request_id in dropped:
            self._compiler.leave(self._waiting.pop(request_id).job)
        return dropped

    def _first_deadline(self) -> float:
        return next(iter(self._waiting.values())).deadline

    def _is_over(self, waiting: _Waiting, now: float) -> bool:
        """Begins its state where the grammar is there."""
        if waiting.state is not None or waiting.error is not None:
            return True
        if waiting.job.result.done():
            try:
                waiting.state = _grammar(waiting.job.result).start()
            except Exception as error:
                waiting.error = _told(error, f"the grammar of request {waiting.request.request_id!r}")
        elif waiting.deadline <= now:
            waiting.error = self._too_late()
        else:
            return False
        return True

    def _leave(self, request_id: str, error: str | None) -> Ready:
        waiting = self._waiting.pop(request_id)
        request = waiting.request
        self._compiler.leave(waiting.job, overdue=not waiting.job.result.done())
        if error is None:
            assert request.grammar is not None
            assert waiting.state is not None
            self._running[request_id] = _Running(request.grammar, waiting.state, request.stop_token_ids)
        return Ready(request, error)

    def _too_late(self) -> str:
        limit = f"structured_outputs.compile_timeout={self._timeout:g} s"
        return f"the grammar was not compiled within {limit}; make it simpler, or raise the limit"

    # -- GrammarStates -----------------------------------------------------------------------------------------------

    def bitmasks(self, step_id: int, slots: Sequence[int], request_ids: Sequence[str]) -> GrammarOutput:
        size = self._row_bytes
        buffer = bytearray(size * len(slots))
        with memoryview(buffer) as rows:
            for row, request_id in enumerate(request_ids):
                self._fill(self._running[request_id], rows[row * size : (row + 1) * size])
        return GrammarOutput(step_id=step_id, slots=list(slots), bitmask=bytes(buffer))

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        running = self._running[request_id]
        if running.failure is None:
            try:
                if not running.state.accept(token_ids):
                    running.failure = f"the tokens {list(token_ids)} are not what the grammar allows"
            except Exception as error:
                self._fail(running, error)
        return running.failure

    def terminated(self, request_id: str) -> bool:
        running = self._running[request_id]
        return running.failure is None and running.state.terminated

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def _fill(self, running: _Running, row: memoryview) -> None:
        try:
            running.state.fill_bitmask(row)
        except Exception as error:
            row[:] = b"\xff" * self._row_bytes
            for token_id in running.stop_token_ids:
                row[token_id // 8] &= ~(1 << token_id % 8)
            self._fail(running, error)

    def _fail(self, running: _Running, error: Exception) -> None:
        """The compiled grammar is not used again: states may share what has become too large, or is broken."""
        running.failure = _told(error, "a grammar")
        self._compiler.discard(running.spec)


def _grammar(result: Future[Grammar]) -> Grammar:
    """What a finished compile gave. Raises ``Exception`` for whatever it raised."""
    error = result.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"compiling it ended with {type(error).__name__}") from error
    return result.result()


def _told(error: Exception, whose: str) -> str:
    """For the user. A ``ValueError`` is about the grammar; anything else is a fault of the backend, and logged."""
    if isinstance(error, ValueError):
        return str(error)
    log.error("%s failed", whose, exc_info=error)
    return f"the grammar backend failed: {type(error).__name__}: {error}"
