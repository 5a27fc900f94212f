"""What travels through the queues: requests to all ranks, replies of one. Sent as plain tuples, so that the queue sees the
large ``bytes`` in them."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from pegboard_executor_mp.packing import Packed


class Request(NamedTuple):
    """``method``: the name of a declared method, or a packed callable."""

    call: int
    method: str | Packed
    arguments: Packed
    """(args, kwargs)"""
    ranks: tuple[int, ...] | None
    """Those that are meant; None: all."""
    answer: int | None
    """The only rank whose result is wanted; the others tell that they are done. None: every one's is."""


class Outcome(enum.IntEnum):
    """DONE: ``content`` is the packed result, or None where it is not wanted. FAILED: the arguments of a ``WorkerError``.
    REFUSED: why there is no such method."""

    DONE = 0
    FAILED = 1
    REFUSED = 2


class Reply(NamedTuple):
    call: int
    outcome: int
    content: Any
