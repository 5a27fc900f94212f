"""Transport: a message queue from one writer to N readers."""

from __future__ import annotations

import abc
from typing import Any, Final

API: Final = 1
PROTOCOL: Final = 1
"""Version inside every handle; a reader refuses another one."""


class Closed(RuntimeError):
    """The other end is gone, or this end was closed or cancelled."""


class Writer(abc.ABC):
    """Invariants: FIFO; exactly once per reader; back-pressure instead of loss; bounded memory; a dead reader is ``Closed``,
    not a hang."""

    @abc.abstractmethod
    def put(self, message: Any, timeout: float | None = None) -> None:
        """Raises ``TimeoutError`` when a slow reader leaves no room, ``Closed`` when a reader is dead."""

    @abc.abstractmethod
    def handle(self) -> Any:
        """Picklable; a reader is made from it in another process."""

    @abc.abstractmethod
    def wait_ready(self, timeout: float | None = None) -> None:
        """Until all readers are attached."""

    @abc.abstractmethod
    def close(self) -> None:
        """Idempotent; unlinks what it made."""


class Reader(abc.ABC):
    """Invariants: a failed or timed-out ``get`` loses nothing; the idle side sleeps; messages outlive the slot they came in."""

    @abc.abstractmethod
    def get(self, timeout: float | None = None) -> Any: ...

    @abc.abstractmethod
    def cancel(self) -> None:
        """From any thread: a waiting ``get`` raises ``Closed``."""

    @abc.abstractmethod
    def close(self) -> None: ...
