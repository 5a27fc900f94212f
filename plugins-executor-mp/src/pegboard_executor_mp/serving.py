"""A rank's loop: takes requests, has its worker carry them out one after the other, sends replies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from pegboard.contracts.executor import WorkerError
from pegboard.contracts.transport import Closed, Reader, Writer
from pegboard.contracts.worker import Worker, resolve_method
from pegboard_executor_mp.messages import Outcome, Reply, Request
from pegboard_executor_mp.packing import pack, pack_plain, unpack

log = logging.getLogger(__name__)

STEP_METHODS: Final = frozenset({"execute_model", "sample_tokens"})


class Terminated(BaseException):
    """SIGTERM came."""


class Serving:
    """``run`` is the process's main thread, in which worker and plugins are called.

    ``KeyboardInterrupt`` and ``SystemExit`` raised in a call fail that call, as any other exception does.
    """

    def __init__(self, rank: int) -> None:
        self.terminated = False
        self._rank = rank
        self._stopping = False
        self._worker: Worker | None = None
        self._requests: Reader | None = None
        self._replies: Writer | None = None
        self._methods: dict[str, Callable[..., Any]] = {}

    def set_up(self, worker: Worker, requests: Reader, replies: Writer) -> None:
        self._worker, self._requests, self._replies = worker, requests, replies
        if self._stopping:
            requests.cancel()

    def stop(self) -> None:
        """From any thread: end after the call that runs."""
        self._stopping = True
        if self._requests is not None:
            self._requests.cancel()

    def on_term(self, *_: object) -> None:
        """The handler of SIGTERM. Raises only once, so that cleaning up is not cut short."""
        first, self.terminated, self._stopping = not self.terminated, True, True
        if first:
            raise Terminated

    def run(self) -> None:
        assert self._requests is not None
        try:
            while not self._stopping:
                self._serve(Request(*self._requests.get()))
        except Closed:
            pass  # the engine's process has closed the queue, or is gone

    def close(self) -> None:
        """Shut the worker down, if there is one, then leave the queues."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.shutdown()
        finally:
            for end in (self._requests, self._replies):
                if end is not None:
                    end.close()

    # -- one call ------------------------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        if request.ranks is not None and self._rank not in request.ranks:
            return
        assert self._replies is not None
        self._replies.put(tuple(self._reply(request)))

    def _reply(self, request: Request) -> Reply:
        plain = request.method in STEP_METHODS
        try:
            try:
                function = self._function(request.method)
            except AttributeError as error:
                if isinstance(request.method, str):
                    return Reply(request.call, Outcome.REFUSED, str(error))
                raise
            args, kwargs = unpack(request.arguments)
            result = function(*args, **kwargs)
            if request.answer is not None and request.answer != self._rank:
                return Reply(request.call, Outcome.DONE, None)
            return Reply(request.call, Outcome.DONE, pack_plain(result) if plain else pack(result))
        except Terminated:
            raise
        except BaseException as error:
            log.log(logging.ERROR if plain else logging.DEBUG, "%s failed", request.method, exc_info=True)
            return Reply(request.call, Outcome.FAILED, WorkerError.of(self._rank, error).__reduce__()[1])

    def _function(self, method: Any) -> Callable[..., Any]:
        assert self._worker is not None
        if not isinstance(method, str):
            return functools.partial(unpack(method), self._worker)
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = resolve_method(self._worker, method)
        return found
