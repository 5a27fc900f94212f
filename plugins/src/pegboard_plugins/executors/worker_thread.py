"""WorkerThread: the thread of this process on which a worker lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, Final

from pegboard.contracts.executor import ExecutorFailed, WorkerError

log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0
"""How long ``stop`` waits for what is running; a thread that hangs is left behind."""


class WorkerThread:
    """Runs functions one after the other on a daemon thread. Does not know the executor, so that it can be collected."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        """Of the worker, for errors."""
        self.at_end: Callable[[], None] | None = None
        """Run on the thread when it stops."""
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="pegboard-worker", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Raises ``ExecutorFailed`` after ``refuse`` or ``stop``. From the thread itself the function runs at once."""
        future: Future[Any] = Future()
        if self.is_current:
            self._execute(future, function)
            return future
        with self._lock:
            if self._refusal is not None:
                raise ExecutorFailed(self._refusal)
            self._open.add(future)
            self._queue.put((future, function))
        return future

    def refuse(self, reason: str) -> None:
        """End every call that is waiting or running with ``ExecutorFailed``, and take no more."""
        with self._lock:
            self._refusal = self._refusal or reason
            pending, self._open = self._open, set()
        for future in pending:
            _settle(future, None, ExecutorFailed(reason))

    def give_up(self, future: Future[Any], error: BaseException) -> None:
        """End one call early: it does not start any more, or its reply is dropped."""
        with self._lock:
            self._open.discard(future)
        _settle(future, None, error)

    def stop(self) -> None:
        """End the thread after the function that it is running, if that ends in time."""
        self.refuse("the executor was shut down")
        self._queue.put(None)
        if not self.is_current:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, function = entry
            with self._lock:
                wanted = future in self._open and future.set_running_or_notify_cancel()
            if wanted:
                self._execute(future, function)
            with self._lock:
                self._open.discard(future)
            del entry, future, function  # hold nothing while idle
        if self.at_end is not None:
            try:
                self.at_end()
            except Exception:
                log.exception("shutting down the worker failed")
            self.at_end = None

    def _execute(self, future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            result = function()
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: they end the call, not the thread
            _settle(future, None, WorkerError.of(self.rank, error))
        else:
            _settle(future, result, None)


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    """Complete ``future`` unless somebody did before: a late reply is dropped."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass
