"""EventSink: is told what happens to requests. An observer: it cannot change anything."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any, Final

API: Final = 1


@dataclass(frozen=True, slots=True)
class Event:
    """``kind`` is one of queued, scheduled, preempted, resumed, first_token, finished. ``time`` is ``time.monotonic()``."""

    kind: str
    request_id: str
    step: int
    time: float
    data: dict[str, Any] = field(default_factory=dict)


class EventSink(abc.ABC):
    """Invariants: must not block (queue and return); what it raises is logged once and counted, and after
    ``MAX_FAILURES`` failures it is switched off; it never changes tokens."""

    MAX_FAILURES: Final = 10

    @abc.abstractmethod
    def emit(self, event: Event) -> None: ...

    def close(self) -> None:
        """The engine has ended: write what is still held. Called once."""
