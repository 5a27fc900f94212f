"""What planning must know of a layer group, and the sizes at which one way of computing becomes faster than another."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes for one kind of device. ``benchmarks/attention.py`` measures them; results do not depend on them."""

    group_bytes: int
    """Keys, values and scores of one group of rows."""
    padding_blocks: int
    """Blocks of padding that cost as much as one more group."""
    tile_scores: int
    """Scores (numbers, all heads) of one tile of queries, unless that makes the tile narrower than ``min_tile``."""
    min_tile: int
    """Queries per tile at least: narrower ones make the matrices too small."""
    max_tile: int
    """Queries per tile at most: narrower ones skip more of the causal triangle."""
    shared_blocks: int = 96
    """Blocks that a common prefix must spare before its rows are computed together."""
    shared_queries: int = 64
    """Longest rows that are computed over a common prefix: with more queries, products outweigh the gather that it spares."""
    float32_keys: int = 0
    """Decode rows with at most so many keys in all are computed in float32, because setting up a narrower product costs more."""


CPU = Limits(group_bytes=4 << 20, padding_blocks=48, tile_scores=2 << 20, min_tile=32, max_tile=128, float32_keys=320)
"""A group stays in a near cache; one more group costs about 30 microseconds."""

ACCELERATOR = Limits(group_bytes=256 << 20, padding_blocks=4096, tile_scores=64 << 20, min_tile=64, max_tile=1024)
"""Few large launches. Reasoned, not measured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer group on one device."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    itemsize: int
    """Bytes of one number, in the type in which attention computes."""
    limits: Limits

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def columns(self) -> int:
        """Scores per vector register: widths are multiples of it, because softmax is several times slower on ragged ends."""
        return 64 // self.itemsize

    @property
    def block_unit(self) -> int:
        """Blocks that make whole vectors of columns."""
        return self.columns // math.gcd(self.columns, self.block_size)


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above ``value``."""
    return -(-value // multiple) * multiple
