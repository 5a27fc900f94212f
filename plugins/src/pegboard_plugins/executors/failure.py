"""Failure: that an executor has failed for good, why, and who wants to know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Failure:
    """Happens at most once. Thread-safe."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.happened = threading.Event()
        """Set when whatever had to be done first is done."""
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[BaseException], None]] = []

    def register(self, callback: Callable[[BaseException], None]) -> None:
        """``callback(cause)`` once it has failed, at once if it has."""
        with self._lock:
            cause = self.cause
            if cause is None:
                self._callbacks.append(callback)
        if cause is not None:
            callback(cause)

    def happen(self, cause: BaseException, first: Callable[[], object]) -> None:
        """``first`` is called before the callbacks. A second cause is a symptom, and passed over."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = cause
            callbacks, self._callbacks = self._callbacks, []
        first()
        self.happened.set()
        for callback in callbacks:
            try:
                callback(cause)
            except Exception:
                log.exception("a failure callback raised; the others are called all the same")
