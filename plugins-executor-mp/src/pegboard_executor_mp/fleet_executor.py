"""FleetExecutor: calls of an executor to ranks in other processes, however those are started and whatever carries the calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, NoReturn, Protocol

from pegboard.contracts.executor import ALL, HEALTH_SECONDS, Executor, ExecutorFailed, Ranks
from pegboard.contracts.transport import Closed
from pegboard_executor_mp.calls import Call, Calls, Deadline
from pegboard_executor_mp.failure import VERDICT_SECONDS, Failure
from pegboard_executor_mp.messages import Request
from pegboard_executor_mp.packing import pack, pack_plain


class Requests(Protocol):
    """As ``pegboard.contracts.transport.Writer``: messages are the tuples of a ``Request``."""

    def put(self, message: Any, timeout: float | None = None) -> None: ...


class RankFleet(Protocol):
    """The ranks. It gives their replies to the executor's ``Calls``, tells its ``Failure`` when one is lost, and has no reference
    to the executor itself, which may be forgotten meanwhile."""

    hurry: bool
    """Give the ranks no time to end by themselves: what they wait for may never come."""

    @property
    def requests(self) -> Requests: ...

    def fail(self, cause: BaseException) -> None:
        """For good: every call ends, whoever wants to know is told, the ranks are stopped."""

    def raise_verdict(self, otherwise: str) -> NoReturn:
        """Raise what the executor has failed of, as soon as that is known; ``ExecutorFailed(otherwise)`` if it never is."""

    def stop(self) -> None:
        """End everything and leave nothing, in bounded time. Idempotent; at whatever point of a start."""


class FleetExecutor(Executor):
    """``_init_executor`` of a subclass makes ``_calls`` and ``_failure``, a fleet of them, and calls ``_start``.

    Invariants beside those of ``Executor``: calls run in each rank one after the other, in the order in which they were made. A
    call that overruns its time-out goes on in the ranks. ``KeyboardInterrupt`` and ``SystemExit`` raised inside a call fail that
    call. The end of a rank is the end of the executor: the error names the rank and how it ended, and the other ranks are
    stopped. An object that is forgotten without ``shutdown`` stops its ranks when it is collected, at the latest when the
    interpreter ends.
    """

    section: ClassVar[str]
    """The section of the configuration with its ``start_timeout``, for messages."""

    _calls: Calls
    _failure: Failure
    _fleet: RankFleet
    _start_timeout: float

    def _start(self, fleet: RankFleet, start: Callable[[Deadline], object], timeout: float) -> None:
        """``start(deadline)`` returns when all ranks take calls; then they run their device and model phases."""
        self._start_timeout = timeout
        self._fleet = fleet
        self._finalizer = weakref.finalize(self, fleet.stop)
        deadline = Deadline(timeout)
        try:
            start(deadline)
            self.collective_rpc("init_device", timeout=deadline.left())
            self.collective_rpc("load_model", timeout=deadline.left())
        except BaseException as error:
            fleet.hurry = True
            self.shutdown()
            if not isinstance(error, TimeoutError):
                raise
            raise self._start_took_too_long(error) from None

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

    def waits_for(self) -> str:
        oldest = self._calls.oldest()
        return "" if oldest is None else self._waits_for(oldest)

    def _waits_for(self, call: Call) -> str:
        return call.waits_for()

    def register_failure_callback(self, callback: Callable[[BaseException], None]) -> None:
        self._failure.register(callback)

    def _boot_phase(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        try:
            return self.collective_rpc(method, args, timeout=self._start_timeout)  # type: ignore[no-any-return]
        except TimeoutError as error:
            late = self._start_took_too_long(error)
            self._fleet.fail(late)
            raise late from None

    def _start_took_too_long(self, error: TimeoutError) -> TimeoutError:
        limit = f"plugins.{self.section}.start_timeout={self._start_timeout} s"
        return TimeoutError(f"the ranks took longer to start than {limit}: {error}")

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

    def _send(self, call: Call, request: Request, deadline: Deadline) -> None:
        try:
            self._fleet.requests.put(tuple(request), deadline.left())
        except Closed:
            self._failure.wait(VERDICT_SECONDS)
            self._calls.fail(call.id, ExecutorFailed("the queue to the ranks is closed"))
            call.future.result()  # raises what the call has ended with
        except TimeoutError:
            late = TimeoutError(f"{call.name}: {self._waits_for(call)} took nothing off the queue within {deadline.seconds} s")
            self._calls.fail(call.id, late)
            raise late from None
        except BaseException as error:
            self._calls.fail(call.id, error)
            raise

    def _wait(self, call: Call, deadline: Deadline) -> Any:
        try:
            return call.future.result(deadline.left())
        except TimeoutError:
            late = self._late(call, deadline)
            if self._calls.fail(call.id, late):
                raise late from None
            return call.future.result()  # which came at the last moment

    def _timed(self, call: Call, deadline: Deadline) -> Future[Any]:
        left = deadline.left()
        if left is not None:
            timer = threading.Timer(left, lambda: self._calls.fail(call.id, self._late(call, deadline)))
            timer.daemon = True
            timer.start()
            call.future.add_done_callback(lambda _: timer.cancel())
        return call.future

    def _late(self, call: Call, deadline: Deadline) -> TimeoutError:
        return TimeoutError(f"{call.name}: no answer from {self._waits_for(call)} within {deadline.seconds} s")


def _completed(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
