"""UniProcExecutor: one worker in the engine's own process, on a thread of its own.

Why a thread: calls from several threads take their turn without a lock around a step, a call can time out, a step can be
submitted without waiting for it, and an interrupt of the main thread does not cut a forward in two. It costs some tens of
microseconds per call. torch keeps its thread count and inference mode per thread: the worker sets them where it computes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

from pegboard.contracts.executor import ALL, Executor, Ranks
from pegboard.contracts.worker import Worker, resolve_method
from pegboard_plugins.executors.failure import Failure
from pegboard_plugins.executors.worker_thread import WorkerThread


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
        self._thread = WorkerThread()
        self._finalizer = weakref.finalize(self, WorkerThread.stop, self._thread)
        self._failure = Failure()
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
        self._failure.register(callback)

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
        """The worker is lost: remember why, end what waits, tell everybody once."""
        self._failure.happen(cause, lambda: self._thread.refuse(f"the executor has failed: {cause}"))
