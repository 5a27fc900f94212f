"""Failure: that an executor has failed for good, why, and who wants to know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pegboard.contracts.executor import ExecutorFailed

log = logging.getLogger(__name__)

Callback = Callable[[BaseException], None]


class Failure:
    """Happens at most once, and not any more after ``close``. Thread-safe."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callback] = []
        self._closed = False
        self._settled = threading.Event()

    def register(self, callback: Callback) -> None:
        """``callback(cause)`` once it has failed, at once if it has."""
        with self._lock:
            if self.cause is None:
                self._callbacks.append(callback)
        if self.cause is not None:
            callback(self.cause)

    def happen(self, cause: BaseException, first: Callable[[ExecutorFailed], object]) -> None:
        """``first`` is called, with what calls are to end with, before the callbacks. The second cause is only a symptom."""
        with self._lock:
            if self._closed or self.cause is not None:
                return
            self.cause = cause
            callbacks, self._callbacks = self._callbacks, []
        log.error("the executor has failed: %s", cause)
        refusal = ExecutorFailed(str(cause) if isinstance(cause, ExecutorFailed) else f"the executor has failed: {cause}")
        refusal.__cause__ = cause
        first(refusal)
        self._settled.set()
        for callback in callbacks:
            try:
                callback(cause)
            except Exception:
                log.exception("a failure callback raised; the others are called all the same")

    def close(self) -> None:
        """From now on whatever ends was ended on purpose."""
        with self._lock:
            self._closed = True
            self._callbacks.clear()
        self._settled.set()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, timeout: float) -> bool:
        """Until it has failed or was closed."""
        return self._settled.wait(timeout)
