"""What a writer gives to the process that shall read: everything that ``attach`` needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pegboard_executor_mp.queue.contract import HandleRefused

PROTOCOL: Final = 1
"""Of handles and of messages between hosts. A reader refuses another one."""


@dataclass(frozen=True)
class Handle:
    """Picklable. A local reader's has ``segment``, the queue's name in ``/dev/shm``. A remote one's has the ``tcp://``
    ``address`` to connect to, the ``token`` that the writer asks for, and the seconds without a sign of life after which each
    end gives up the other."""

    reader: int
    segment: str | None = None
    address: str | None = None
    token: bytes = b""
    peer_timeout: float = 5.0
    protocol: int = PROTOCOL

    def check(self) -> None:
        """Raises ``HandleRefused`` when this version cannot read it."""
        if self.protocol != PROTOCOL:
            raise HandleRefused(f"the handle has protocol {self.protocol}, this version of the queue reads {PROTOCOL}")
