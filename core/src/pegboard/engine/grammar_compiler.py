"""GrammarCompiler: grammars off the step loop, on threads of its own."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from pegboard.contracts.grammar import Grammar, GrammarBackend
from pegboard.wire import GrammarSpec

KEPT: Final = 256
"""Compiled grammars that are kept, the least recently asked for given up first."""
MAX_LOST: Final = 16
"""Threads that may be lost to compiles without end before new ones have to wait."""


@dataclass(slots=True, eq=False)
class Job:
    """One compile, shared by all requests with its ``spec``. ``wanted`` counts those that still wait for it."""

    spec: GrammarSpec
    result: Future[Grammar] = field(default_factory=Future)
    wanted: int = 0
    lost: bool = False
    """A thread has been started in place of the one that works on it."""


class GrammarCompiler:
    """Starts threads when they are needed, at most ``num_threads`` that are not lost. They are daemons: a compile without end
    does not keep the process alive. Thread-safe."""

    def __init__(self, make_backend: Callable[[], GrammarBackend], num_threads: int) -> None:
        """``make_backend`` is called once, by the first compile, on its thread."""
        self._make_backend, self._num_threads = make_backend, num_threads
        self._backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()
        self._lock = threading.Lock()
        self._jobs: OrderedDict[GrammarSpec, Job] = OrderedDict()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._num_lost = 0
        self._closed = False

    def submit(self, spec: GrammarSpec) -> Job:
        """The compile of ``spec``, under way or done before; a failed one is begun again. Give each back with ``leave``."""
        with self._lock:
            job = self._jobs.get(spec)
            if job is None or job.result.cancelled() or (job.result.done() and job.result.exception() is not None):
                job = self._jobs[spec] = Job(spec)
                self._queue.put(job)
                self._start_thread()
            self._jobs.move_to_end(spec)
            while len(self._jobs) > KEPT:
                self._jobs.popitem(last=False)
            job.wanted += 1
            return job

    def leave(self, job: Job, *, overdue: bool = False) -> None:
        """One request waits no longer. A compile that nobody waits for does not start; an ``overdue`` one that has started
        loses its place among the threads to another."""
        with self._lock:
            job.wanted -= 1
            if job.wanted == 0:
                job.result.cancel()
            if overdue and job.result.running() and not job.lost and self._num_lost < MAX_LOST:
                job.lost = True
                self._num_lost += 1
                self._start_thread()

    def discard(self, spec: GrammarSpec) -> None:
        """Compile ``spec`` anew when it is asked for again."""
        with self._lock:
            self._jobs.pop(spec, None)

    def close(self) -> None:
        """End the threads; one that compiles ends when it is done, and is waited for up to a second. Idempotent."""
        with self._lock:
            self._closed = True
            jobs, self._jobs = list(self._jobs.values()), OrderedDict()
            threads = list(self._threads)
        for job in jobs:
            job.result.cancel()
        for _ in threads:
            self._queue.put(None)
        until = time.monotonic() + 1.0
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _start_thread(self) -> None:
        """With the lock held."""
        if not self._closed and len(self._threads) - self._num_lost < self._num_threads:
            thread = threading.Thread(target=self._run, name="pegboard-grammar", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            grammar, error = self._compile(job.spec)
            with self._lock:  # ``leave`` sees a compile that runs, or its result
                if grammar is not None:
                    job.result.set_result(grammar)
                else:
                    job.result.set_exception(error)
                if job.lost:
                    self._num_lost -= 1
                    self._threads.discard(threading.current_thread())
                    return

    def _compile(self, spec: GrammarSpec) -> tuple[Grammar | None, BaseException | None]:
        try:
            with self._backend_lock:
                if self._backend is None:
                    self._backend = self._make_backend()
            return self._backend.compile(spec), None
        except BaseException as error:  # whatever it is, it is the request's
            return None, error
