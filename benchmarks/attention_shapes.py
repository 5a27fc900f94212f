"""Shapes of ``attention.py``, block tables, and how a path is timed. Standard library only: peers run it in their own Python."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

GEOMETRIES = {"9/3x64": (9, 3, 64), "32/8x128": (32, 8, 128)}
"""Query heads, key heads, head size: SmolLM2-135M's, and Llama-3-8B's."""
CACHE_BYTES = 1 << 29
"""All layers' caches of one path together, at most (but one layer at least)."""
MOST_LAYERS = 30


@dataclass(frozen=True)
class Case:
    """Rows as (tokens in the cache after the step, new tokens); ``shared`` leading tokens are the same blocks for all rows."""

    name: str
    rows: tuple[tuple[int, int], ...]
    geometry: str
    dtype: str
    shared: int = 0

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, head size."""
        return GEOMETRIES[self.geometry]

    @property
    def layers(self) -> int:
        """Layers with caches of their own, so that none finds its keys in the processor's cache: as many as memory allows."""
        _, kv_heads, size = self.heads
        tokens = sum(length for length, _ in self.rows)
        width = 4 if self.dtype == "float32" else 2
        return max(min(CACHE_BYTES // (tokens * 2 * kv_heads * size * width), MOST_LAYERS), 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        return cls(**{**values, "rows": tuple((length, new) for length, new in values["rows"])})


def grid() -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """Name, rows and shared tokens of the shapes that are compared with the peer."""
    for rows in (1, 8, 32):
        for context in (128, 1024, 4096):
            yield f"decode {rows} x {context}", ((context, 1),) * rows, 0
    for tokens in (512, 2048):
        yield f"prefill 1 x {tokens}", ((tokens, tokens),), 0


def serving() -> Iterator[tuple[str, tuple[tuple[int, int], ...], int]]:
    """More shapes that serving meets."""
    rng = random.Random(0)
    mixed = tuple((rng.randint(64, 384), 1) for _ in range(32))
    yield "decode 32 x 64..384", mixed, 0
    yield "decode 32 x 560, 512 shared", ((560, 1),) * 32, 512
    yield "prefill 4 x 512", ((512, 512),) * 4, 0
    yield "prefill 16 of 20..60", tuple((20 + 5 * (i % 9), 20 + 5 * (i % 9)) for i in range(16)), 0
    yield "512 after 512 cached", ((1024, 512),), 0
    yield "32 x 16 after 512 cached", ((528, 16),) * 32, 0
    yield "32 x 16 after 512 shared", ((528, 16),) * 32, 512
    yield "prefill 512 + 16 decodes", ((512, 512), *mixed[:16]), 0


def tables(case: Case, block: int) -> tuple[list[list[int]], int]:
    """A block table per row, of shuffled blocks, and how many blocks there are."""
    common = case.shared // block
    own = [-(-length // block) - common for length, _ in case.rows]
    count = common + sum(own)
    free = list(range(count))
    random.Random(0).shuffle(free)
    prefix = [free.pop() for _ in range(common)]
    return [prefix + [free.pop() for _ in range(blocks)] for blocks in own], count


def slots(case: Case, table: list[list[int]], block: int) -> list[int]:
    """Where the new tokens' keys go."""
    pairs = zip(table, case.rows, strict=True)
    return [row[at // block] * block + at % block for row, (n, new) in pairs for at in range(n - new, n)]


def least_times(run: Callable[[int], None], layers: int, seconds: float) -> list[float]:
    """Microseconds of each layer's quickest call within so many seconds (one at least).

    Layers are timed one by one, because a call that is shorter than a time slice has a least time that neighbours on
    the machine do not move.
    """
    least = [float("inf")] * layers
    end, turns = time.perf_counter() + seconds, 0
    while turns < 1 or time.perf_counter() < end:
        turns += 1
        for layer in range(layers):
            begin = time.perf_counter()
            run(layer)
            least[layer] = min(least[layer], 1e6 * (time.perf_counter() - begin))
    return least
