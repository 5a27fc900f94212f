"""One call in a rank: from its request to its reply, whatever it raises."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from pegboard.contracts.communicator import PeerLost
from pegboard.contracts.executor import WorkerError
from pegboard.contracts.worker import Worker, resolve_method
from pegboard_executor_mp.messages import Outcome, Reply, Request
from pegboard_executor_mp.packing import pack, pack_plain, unpack

log = logging.getLogger(__name__)

STEP_METHODS: Final = frozenset({"execute_model", "sample_tokens"})


class Answering:
    """``KeyboardInterrupt`` and ``SystemExit`` raised in a call fail that call, as any other exception does; only what is in
    ``passing`` is raised."""

    def __init__(self, rank: int, worker: Worker, passing: tuple[type[BaseException], ...] = ()) -> None:
        self._rank, self._worker, self._passing = rank, worker, passing
        self._methods: dict[str, Callable[..., Any]] = {}

    def reply(self, request: Request) -> Reply:
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
        except BaseException as error:
            if isinstance(error, self._passing):
                raise
            if isinstance(error, PeerLost):
                log.warning("%s failed: %s", request.method, error)  # where it went wrong, the other rank tells
            else:
                log.log(logging.ERROR if plain else logging.DEBUG, "%s failed", request.method, exc_info=True)
            return Reply(request.call, Outcome.FAILED, WorkerError.of(self._rank, error).__reduce__()[1])

    def _function(self, method: Any) -> Callable[..., Any]:
        if not isinstance(method, str):
            return functools.partial(unpack(method), self._worker)
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = resolve_method(self._worker, method)
        return found
