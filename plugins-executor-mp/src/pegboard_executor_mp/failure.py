"""Failure: that an executor has failed for good, why, and who wants to know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from pegboard.contracts.executor import ExecutorFailed

log = logging.getLogger(__name__)

VERDICT_SECONDS: Final = 5.0
"""How long to wait for the report on a process that has ended, which takes milliseconds."""

Callback = Callable[[BaseException], None]


class Failure:
    """Happens at most once, and not any more after ``close``. Thread-safe, and re-entrant: ``close`` may be called by a signal's
    handler or a finalizer that comes in the middle of another method."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._callbacks: list[Callback] = []
        self._closed = False
        self._settled = False

    def register(self, callback: Callback) -> None:
        """``callback(cause)`` once it has failed, at once if it has."""
        with self._changed:
            if self.cause is None:
                self._callbacks.append(callback)
        if self.cause is not None:
            callback(self.cause)

    def happen(self, cause: BaseException, first: Callable[[ExecutorFailed], object]) -> None:
        """``first`` is called, with what calls are to end with, before the callbacks. The second cause is only a symptom."""
        with self._changed:
            if self._closed or self.cause is not None:
                return
            self.cause = cause
            callbacks, self._callbacks = self._callbacks, []
        log.error("the executor has failed: %s", cause)
        refusal = ExecutorFailed(str(cause) if isinstance(cause, ExecutorFailed) else f"the executor has failed: {cause}")
        refusal.__cause__ = cause
        try:
            first(refusal)
        finally:
            self._settle()
            _tell(callbacks, cause)

    def close(self) -> None:
        """From now on whatever ends was ended on purpose."""
        with self._changed:
            self._closed = True
            self._callbacks.clear()
            self._settle()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, timeout: float) -> bool:
        """Until it has failed or was closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled, timeout)

    def _settle(self) -> None:
        with self._changed:
            self._settled = True
            self._changed.notify_all()


def _tell(callbacks: list[Callback], cause: BaseException) -> None:
    for callback in callbacks:
        try:
            callback(cause)
        except (Exception, SystemExit):  # the latter would end no more than the thread that found the cause
            log.exception("a failure callback raised; the others are called all the same")
