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
    """Invariants: FIFO; exactly once per reader, whenever it attaches; a message is what it was when ``put`` was called;
    back-pressure instead of loss; bounded memory; a dead reader is ``Closed``, not a hang. ``put`` may be called from several
    threads."""

    @abc.abstractmethod
    def put(self, message: Any, timeout: float | None = None) -> None:
        """Raises ``TimeoutError`` when a slow reader leaves no room (then no reader gets the message), ``Closed`` when a
        reader is dead, and whatever pickling ``message`` raises. ``timeout``: seconds, None for ever. A message that is larger
        than the room in the queue may have to wait until its readers take it: a process must not put such a message while it
        alone can empty the queue that its readers are blocked on."""

    @abc.abstractmethod
    def handle(self, reader: int = 0) -> Any:
        """For reader number ``reader``. Picklable; a reader is made from it in another process, once."""

    @abc.abstractmethod
    def wait_ready(self, timeout: float | None = None) -> None:
        """Until all readers are attached. Raises ``TimeoutError``, ``Closed``."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """From any thread: a waiting ``put`` raises ``Closed``, and so do all later ones."""

    @abc.abstractmethod
    def close(self) -> None:
        """Idempotent; unlinks what it made. Readers still get what was put before."""


class Reader(abc.ABC):
    """Invariants: a failed or timed-out ``get`` loses nothing; the idle side sleeps; messages outlive the slot they came in,
    and their buffers are writable where they were; a message that can't be loaded is an error of the one ``get`` that would
    have returned it. ``get`` is for one thread at a time."""

    @abc.abstractmethod
    def get(self, timeout: float | None = None) -> Any:
        """The next message. Raises ``TimeoutError``; ``Closed`` once the writer is gone and its last message has been read."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """From any thread: a waiting ``get`` raises ``Closed``, and so do all later ones."""

    @abc.abstractmethod
    def close(self) -> None:
        """Idempotent."""
