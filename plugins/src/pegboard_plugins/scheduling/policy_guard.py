"""PolicyGuard: calls policies and event sinks so that a faulty one costs its answer, not the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pegboard.contracts.event_sink import Event, EventSink

logger = logging.getLogger(__name__)
T = TypeVar("T")


class PolicyGuard:
    """What a policy raises, or an answer that makes no sense, turns into the default decision. It is logged once per policy
    and listed in ``degraded`` from then on; with ``strict`` the exception passes through instead."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._degraded: dict[str, str] = {}

    @property
    def degraded(self) -> list[str]:
        return list(self._degraded.values())

    def ask(self, policy: object, question: Callable[..., T], *args: Any, default: T) -> T:
        """``question(*args)``, or ``default`` if it raises."""
        try:
            return question(*args)
        except Exception as error:
            if self.strict:
                raise
            self.report(policy, f"{getattr(question, '__name__', 'a call')} raised {type(error).__name__}: {error}", error)
            return default

    def refuse(self, policy: object, question: str, answer: object, expected: str) -> None:
        """Note an answer that cannot be used. Raises ``TypeError`` with ``strict``."""
        message = f"{question} returned {answer!r}, not {expected}"
        if self.strict:
            raise TypeError(f"{_name(policy)}: {message}")
        self.report(policy, message)

    def report(self, policy: object, message: str, error: BaseException | None = None) -> None:
        name = _name(policy)
        if name not in self._degraded:
            self._degraded[name] = f"{name}: {message}"
            logger.error("%s: %s; the default decides in its place from now on where it fails", name, message, exc_info=error)


class EventEmitter:
    """Tells every sink; one that raises ``EventSink.MAX_FAILURES`` times is switched off. Falsy when nobody listens."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        self._sinks = list(sinks)
        self._failures: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def emit(self, event: Event) -> None:
        for sink in list(self._sinks):
            try:
                sink.emit(event)
            except Exception:
                self._failed(sink)

    def _failed(self, sink: EventSink) -> None:
        count = self._failures[id(sink)] = self._failures.get(id(sink), 0) + 1
        if count == 1:
            logger.exception("event sink %s raised", _name(sink))
        if count >= EventSink.MAX_FAILURES:
            logger.error("event sink %s raised %d times and is switched off", _name(sink), count)
            self._sinks.remove(sink)


def _name(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
