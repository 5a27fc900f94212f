"""What the queue's classes derive from: Pegboard's transport contract or, where core is not installed, the same names here.

So ``except pegboard.contracts.transport.Closed`` works for whoever has core, and the queue works without it.
"""

from __future__ import annotations

__all__ = ["Closed", "DeadReader", "DeadWriter", "HandleRefused", "MessageError", "NoSharedMemory", "Reader", "Writer"]

try:
    from pegboard.contracts.transport import Closed, Reader, Writer
except ImportError:

    class Closed(RuntimeError):  # type: ignore[no-redef]
        """The other end is gone, or this end was closed or cancelled."""

    class Writer:  # type: ignore[no-redef]
        """Stands for the contract's base class."""

    class Reader:  # type: ignore[no-redef]
        """Stands for the contract's base class."""


class DeadReader(Closed):
    """A reader's process ended, its host is gone, or it closed its end. ``reader`` is its index."""

    def __init__(self, reader: int, what: str) -> None:
        super().__init__(reader, what)
        self.reader = reader

    def __str__(self) -> str:
        return f"reader {self.reader} {self.args[1]}"


class DeadWriter(Closed):
    """The writer's process ended, its host is gone, or it closed the queue."""


class HandleRefused(ValueError):
    """A handle of another version, of another machine, or for a reader that is attached already."""


class MessageError(RuntimeError):
    """A message arrived but could not be unpickled (``__cause__`` tells why). It counts as received."""


class NoSharedMemory(OSError):
    """``/dev/shm`` has no room for the queue."""
