"""MultiprocExecutor: one process per rank on this host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final

from pegboard.contracts.executor import ALL, Executor, ExecutorFailed, Ranks
from pegboard.contracts.transport import Closed
from pegboard_executor_mp import launch
from pegboard_executor_mp.calls import Call, Calls, Deadline
from pegboard_executor_mp.failure import Failure
from pegboard_executor_mp.fleet import VERDICT_SECONDS, Fleet
from pegboard_executor_mp.messages import Request
from pegboard_executor_mp.options import Options
from pegboard_executor_mp.packing import pack, pack_plain

HEALTH_SECONDS: Final = 60.0
"""How long ``check_health`` waits where ``executor.step_timeout`` says nothing."""


class MultiprocExecutor(Executor):
    """Invariants beside those of ``Executor``: calls run on the main thread of each rank's process, one after the other, in the
    order in which they were made. None of them imports the script that runs the engine, whose process imports no part that ranks
    alone need.

    A call that overruns its time-out goes on in the ranks. ``KeyboardInterrupt`` and ``SystemExit`` raised inside a call fail
    that call. The end of a rank's process is the end of the executor: the error names the rank and how it ended, and the other
    ranks are stopped. An object that is forgotten without ``shutdown`` stops its ranks when it is collected, at the latest when
    the interpreter ends.
    """

    supports_pp: ClassVar[bool] = True
    supports_async_scheduling: ClassVar[bool] = True

    def _init_executor(self) -> None:
        options = self.composition.options("executor_mp") or Options()
        launch.check_portable(self.composition)
        launch.check_shared_memory(options, self.world.size)
        self._calls, self._failure = Calls(), Failure()
        self._fleet = Fleet(self.composition, options, self.world, self._calls, self._failure)
        self._finalizer = weakref.finalize(self, self._fleet.stop)
        deadline = Deadline(options.start_timeout)
        try:
            self._fleet.greet(deadline)
            self.collective_rpc("init_device", timeout=deadline.left())
            self.collective_rpc("load_model", timeout=deadline.left())
        except BaseException as error:
            self._fleet.hurry = True
            self.shutdown()
            if not isinstance(error, TimeoutError):
                raise
            limit = f"plugins.executor_mp.start_timeout={deadline.seconds} s"
            raise TimeoutError(f"the ranks took longer to start than {limit}: {error}") from None

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
        asked = self._asked(ranks)
        name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        packed = method if isinstance(method, str) else pack(method)
        arguments = pack((tuple(args), kwargs or {}))
        if not asked:
            return _completed([]) if non_block else []
        deadline = Deadline(timeout)
        call = self._calls.begin(name, asked, None)
        self._send(call, Request(call.id, packed, arguments, None if ranks == ALL else tuple(asked), None), deadline)
        return self._timed(call, deadline) if non_block else self._wait(call, deadline)

    def check_health(self) -> None:
        """A round trip to every rank. One that runs a step answers after it."""
        timeout = self.config.executor.step_timeout or HEALTH_SECONDS
        try:
            self.collective_rpc("check_health", timeout=timeout)
        except TimeoutError as error:
            raise ExecutorFailed(str(error)) from error

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self._failure.register(callback)

    def _step(self, method: str, argument: Any, non_block: bool) -> Any:
        """A step that outlasts ``executor.step_timeout`` is a hung worker: the executor has failed."""
        deadline = Deadline(self.config.executor.step_timeout)
        arguments = pack_plain(((argument,), {}))
        output_rank = self.world.output_rank
        call = self._calls.begin(method, range(self.world.size), output_rank)
        try:
            self._send(call, Request(call.id, method, arguments, None, output_rank), deadline)
            return call.future if non_block else self._wait(call, deadline)
        except TimeoutError as error:
            self._fleet.fail(TimeoutError(f"{error} (executor.step_timeout)"))
            raise

    def _shutdown(self) -> None:
        self._finalizer()

    # -- calls -------------------------------------------------------------------------------------------------------

    def _asked(self, ranks: Ranks) -> Sequence[int]:
        size = self.world.size
        if ranks == ALL:
            return range(size)
        asked = tuple(int(rank) for rank in ranks)
        if any(not 0 <= rank < size for rank in asked) or len(set(asked)) < len(asked):
            raise ValueError(f"ranks={ranks!r}: this executor has the ranks 0 to {size - 1}, and each can be asked once")
        return asked

    def _send(self, call: Call, request: Request, deadline: Deadline) -> None:
        try:
            self._fleet.requests.put(tuple(request), deadline.left())
        except Closed:
            self._failure.wait(VERDICT_SECONDS)
            self._calls.fail(call.id, ExecutorFailed("the queue to the ranks is closed"))
            call.future.result()  # raises what the call has ended with
        except TimeoutError:
            late = TimeoutError(f"{call.name}: {call.waits_for()} took nothing off the queue within {deadline.seconds} s")
            self._calls.fail(call.id, late)
            raise late from None
        except BaseException as error:
            self._calls.fail(call.id, error)
            raise

    def _wait(self, call: Call, deadline: Deadline) -> Any:
        try:
            return call.future.result(deadline.left())
        except TimeoutError:
            late = _late(call, deadline)
            self._calls.fail(call.id, late)
            raise late from None

    def _timed(self, call: Call, deadline: Deadline) -> Future[Any]:
        left = deadline.left()
        if left is not None:
            timer = threading.Timer(left, lambda: self._calls.fail(call.id, _late(call, deadline)))
            timer.daemon = True
            timer.start()
            call.future.add_done_callback(lambda _: timer.cancel())
        return call.future


def _late(call: Call, deadline: Deadline) -> TimeoutError:
    return TimeoutError(f"{call.name}: no answer from {call.waits_for()} within {deadline.seconds} s")


def _completed(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
