"""Order in shared memory.

A rank publishes data by storing into a word after it; a rank that has read the word must see the data. x86-64
keeps stores, and loads, in order but lets a load pass an earlier store; arm64 keeps none of this. So ``fence`` stands

- between data and the word that announces it, on the writing side, and between the word and the data on the reading side;
- between announcing and looking who sleeps, and between saying "asleep" and the last look: one of the two sees the other.

Python has no fence of its own, but its locks are made of atomic instructions. Releasing one has release semantics: whatever came
before stays before. Acquiring it has acquire semantics: whatever comes after stays after. A release followed by an acquire is not
reordered on arm64 (STLR or an atomic with L, then LDAR or an atomic with A: "RCsc"), and on x86-64 both are locked instructions,
each a full barrier, also for the write-combining stores of large copies. The pair, in this order, is therefore a full fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def make_fence() -> Callable[[], None]:
    """A full fence, for one thread."""
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence
