"""UniProcExecutor: one worker in the engine's own process, on a thread of its own.

Why a thread: calls from several threads take their turn without a lock around a step, a call can time out, a step can be
submitted without waiting for it, and an interrupt of the main thread does not cut a forward in two. It costs some tens of
microseconds per call. torch keeps its thread count and inference mode per thread: the worker sets them where it computes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, ClassVar

from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks, WorkerError
from pegboard.contracts.worker import Worker, resolve_method

log = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
"""How long ``shutdown`` waits for a step that is running; a hung one is left behind on its daemon thread."""


class UniProcExecutor(Executor):
    """Invariants beside those of ``Executor``: all calls run on one thread, in the order in which they were made.

    A call that overruns its time-out goes on in the background and its reply is dropped; one that had not started never
    runs. ``KeyboardInterrupt`` and ``SystemExit`` raised inside a call fail that call. An object that is forgotten without
    ``shutdown`` stops its thread when it is collected.
    """

    supports_async_scheduling: ClassVar[bool] = True

    def _init_executor(self) -> None:
        if self.world.size != 1:
            raise ValueError(
                f"executor 'uniproc' runs one worker, but tensor_parallel_size x pipeline_parallel_size is {self.world.size}; "
                f"set both to 1, or choose an executor with several workers (executor.name)"
            )
        self._thread = _WorkerThread()
        self._finalizer = weakref.finalize(self, _WorkerThread.stop, self._thread)
        self._failure: BaseException | None = None
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._callback_lock = threading.Lock()
        self._methods: dict[str, Callable[..., Any]] = {}
        try:
            self._worker: Worker = self._call(lambda: self.composition.create("worker", world=self.world), None)
            self._thread.at_end = self._worker.shutdown
            self.collective_rpc("init_device")
            self.collective_rpc("load_model")
        except BaseException:
            self.shutdown()
            raise

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        non_block: bool = False,
        ranks: Ranks = ALL,
    ) -> Any:
        function = self._function(method)
        asked = 1 if ranks == ALL else len(ranks)
        if ranks != ALL and any(rank != 0 for rank in ranks):
            raise ValueError(f"ranks={ranks!r}: this executor has rank 0 only")
        named = kwargs or {}

        def call() -> list[Any]:
            return [function(*args, **named) for _ in range(asked)]

        return self._submit(call, timeout) if non_block else self._call(call, timeout)

    def check_health(self) -> None:
        self.collective_rpc("check_health", timeout=self.config.executor.step_timeout)

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        with self._callback_lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        """A step that outlasts ``executor.step_timeout`` is a hung worker: the executor has failed."""
        step = super()._step(method, argument, non_block=True)
        if non_block:
            return step
        timeout = self.config.executor.step_timeout
        try:
            return step.result(timeout)
        except TimeoutError:
            self._fail(TimeoutError(f"{method} took longer than executor.step_timeout={timeout} s"))
            raise

    def _shutdown(self) -> None:
        self._finalizer()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _function(self, method: str | Callable[..., Any]) -> Callable[..., Any]:
        if callable(method):
            return lambda *args, **kwargs: method(self._worker, *args, **kwargs)
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = resolve_method(self._worker, method)
        return found

    def _call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        future = self._thread.submit(function)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the worker has not answered within {timeout} s") from None

    def _submit(self, function: Callable[[], Any], timeout: float | None) -> Future[Any]:
        future = self._thread.submit(function)
        if timeout is not None:
            late = TimeoutError(f"the worker has not answered within {timeout} s")
            timer = threading.Timer(timeout, self._thread.give_up, (future, late))
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _fail(self, cause: BaseException) -> None:
        """The worker is lost: remember why, tell everybody once, end what waits."""
        with self._callback_lock:
            if self._failure is not None:
                return
            self._failure = cause
            callbacks, self._callbacks = self._callbacks, []
        self._thread.refuse(f"the executor has failed: {cause}")
        for callback in callbacks:
            try:
                callback(cause)
            except Exception:
                log.exception("a failure callback raised; the others are called all the same")


class _WorkerThread:
    """Runs functions one after the other on a daemon thread. Does not know the executor, so that it can be collected."""

    def __init__(self) -> None:
        self.at_end: Callable[[], None] | None = None
        """Run on the thread when it stops."""
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="pegboard-worker", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Raises ``ExecutorFailed`` after ``refuse`` or ``stop``. From the thread itself the function runs at once."""
        future: Future[Any] = Future()
        if threading.current_thread() is self._thread:
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
        if threading.current_thread() is not self._thread:
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

    @staticmethod
    def _execute(future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            result = function()
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: they end the call, not the thread
            _settle(future, None, WorkerError.of(0, error))
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
