"""OutputKind: how the pieces of one answer are reported."""

from __future__ import annotations

import enum


class OutputKind(enum.Enum):
    """What every ``RequestOutput`` of an unfinished request holds."""

    CUMULATIVE = "cumulative"
    """All text and tokens so far."""
    DELTA = "delta"
    """What is new since the one before; joined they are the whole."""
    FINAL = "final"
    """Nothing until the end: one output, when the request has ended."""
