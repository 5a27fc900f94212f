"""When to spin: a reader's guess of when the next message comes, and a budget for acting on it.

A sleeping reader costs the message a trip through the kernel's scheduler (30 to 70 us, more on virtual machines), a spinning
one costs a core. Engines send at a steady beat, one step after the other. So a reader learns the beat, sleeps until shortly
before the next message is due, and spins there. It may spin ``SHARE`` of the time that goes by and no more: right guesses save
the trip, wrong ones cost that share of a core and then the reader sleeps like any other. With one core it never spins, as
that would keep the writer from running.
"""

from __future__ import annotations

import math
import os
from collections import deque
from typing import Final

SHARE: Final = 0.018
"""Of the time that goes by, how much may be spent spinning."""

CAP: Final = 200e-6
"""Seconds of spinning that can be saved up: after a long silence a reader spins no longer than that."""

_LEAD: Final = 8e-6
"""Seconds by which to be up early, beside the beat's own spread."""


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


_GAPS: Final = 15


class Rhythm:
    """All times are seconds of ``time.monotonic()``, which all processes of a machine share."""

    __slots__ = ("_allowance", "_beat", "_gaps", "_late", "_paid_at", "_spread", "last", "may_spin")

    def __init__(self) -> None:
        self.may_spin = cores() > 1
        self.last = 0.0  # when the last message was published
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._beat = 0.0  # median of the last gaps between messages: one late message does not move it
        self._spread = math.inf  # between their quartiles
        self._late = 60e-6  # how long after its deadline a sleep ends
        self._allowance = 0.0
        self._paid_at = 0.0

    def heard(self, published: float) -> None:
        """A message came that was published then."""
        gaps = self._gaps
        gaps.append(published - self.last)
        self.last = published
        if len(gaps) == _GAPS:
            ordered = sorted(gaps)
            self._beat = ordered[_GAPS // 2]
            self._spread = ordered[-_GAPS // 4] - ordered[_GAPS // 4]

    def plan(self, now: float) -> tuple[float, float] | None:
        """(when to get up, until when to spin); None: just sleep."""
        if not self.may_spin:
            return None
        self._allowance = min(CAP, self._allowance + (now - self._paid_at) * SHARE)
        self._paid_at = now
        due = self.last + self._beat
        early = _LEAD + self._spread
        if due + self._spread < now or early > self._allowance:
            return None
        start = max(now, due - max(early, self._allowance / 4))  # what is left over buys certainty
        return start, start + self._allowance

    def got_up(self, planned: float, now: float) -> None:
        """A sleep that should have ended at ``planned`` ended now."""
        if now > planned:
            self._late += (min(now - planned, CAP) - self._late) / 8

    @property
    def late(self) -> float:
        return self._late

    def spun(self, seconds: float) -> None:
        """By the clock; what goes beyond the allowance was not spent spinning, but waiting for the core."""
        self._allowance -= min(seconds, self._allowance)
