"""Seeds of requests that state none: drawn in the front end, so that every request in the engine core has one."""

from __future__ import annotations

import hashlib
import itertools
import os


class RequestSeeds:
    """Draws 64-bit seeds. Without an engine seed they come from the operating system's entropy. With one they are a hash of it
    and of a counter: an engine that is asked the same things in the same order repeats itself, and an id that is used again
    draws anew. Thread-safe."""

    def __init__(self, engine_seed: int | None) -> None:
        self._engine_seed = engine_seed
        self._count = itertools.count()

    def draw(self) -> int:
        """A seed in [0, 2**64)."""
        if self._engine_seed is None:
            return int.from_bytes(os.urandom(8), "little")
        text = f"{self._engine_seed} {next(self._count)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def shifted(seed: int, by: int) -> int:
    """``seed + by`` modulo 2**64, in the range that a request may state: the seed of the ``by``-th answer."""
    moved = seed + by
    return moved if moved < 2**64 else moved - 2**64
