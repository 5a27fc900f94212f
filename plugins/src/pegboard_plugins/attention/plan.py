"""Which rows are computed together: host arithmetic only, no tensors.

Rows with the same number of new tokens form a *section* (a decode row has one new token); short prompts of nearly equal
length are padded to the longest of them. A section is cut into *groups* of rows with nearly equal context, small enough
that a group's keys, values and scores stay in a core's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np

QUERY_CLASSES = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
"""Upper ends of the query lengths that are padded to a common length; longer ones share a section only when equal."""

GROUP_BYTES = 4 << 20
"""Keys, values and scores of one group: small enough to stay in a near cache (measured with benchmarks/attention.py)."""

PADDING_BLOCKS = 48
"""Blocks of padding that cost as much as the fixed cost of one more group."""

EXACT_KEYS = 320
"""Decode rows with at most so many keys in all are computed in float32, because setting up a bfloat16 product costs more."""

SHARED_BLOCKS = 96
"""Blocks that a common prefix must spare before its rows are computed together; the extra operations cost about as much."""

SHARED_QUERIES = 64
"""Longest rows that are computed over a common prefix. With more queries, products outweigh the gather that it spares."""

TILE_SCORES = 2 << 20
"""Most scores (numbers, all heads) of one tile of queries, unless that makes the tile narrower than ``MIN_TILE``."""

MIN_TILE, MAX_TILE = 32, 128
"""Queries per tile. Narrow tiles skip more of the causal triangle, wide ones multiply larger matrices."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the plan must know of a layer group."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    itemsize: int
    """Bytes of one number, in the type in which attention computes."""
    sliding_window: int | None

    @property
    def columns(self) -> int:
        """Scores per vector register: widths are multiples of it, because softmax is several times slower on ragged ends."""
        return 64 // self.itemsize

    @property
    def block_unit(self) -> int:
        """Blocks that make whole vectors of columns."""
        return self.columns // math.gcd(self.columns, self.block_size)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows in the order in which they are computed; every array is ``[rows]`` int64 on the host."""

    index: np.ndarray
    """Row number in the batch."""
    query_start: np.ndarray
    """First token in the step."""
    query_len: np.ndarray
    kv_len: np.ndarray
    """Tokens in the cache, this step's included."""
    first_block: np.ndarray
    """First block that any of the row's queries sees; earlier ones lie outside the sliding window."""
    num_blocks: np.ndarray
    """Blocks from ``first_block`` to the row's last token."""

    @classmethod
    def of(cls, query_start_loc: np.ndarray, seq_lens: np.ndarray, shape: Shape) -> RowSet:
        """All rows that have tokens."""
        start = query_start_loc.astype(np.int64)
        query_len = np.diff(start)
        index = np.flatnonzero(query_len)
        query_len, kv_len = query_len[index], seq_lens[index].astype(np.int64)
        first_block = np.zeros_like(kv_len)
        if shape.sliding_window is not None:
            first_block = np.maximum(kv_len - query_len - shape.sliding_window + 1, 0) // shape.block_size
        last_block = (kv_len + shape.block_size - 1) // shape.block_size
        return cls(index, start[index], query_len, kv_len, first_block, last_block - first_block)

    def take(self, which: np.ndarray | slice) -> RowSet:
        """Some of the rows, in the order given (positions, a mask or a slice)."""
        return RowSet(*(getattr(self, field.name)[which] for field in fields(RowSet)))

    @classmethod
    def concatenate(cls, parts: list[RowSet]) -> RowSet:
        """One set after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def prefix(self, blocks: int, block_size: int) -> RowSet:
        """The first row's first ``blocks`` blocks, as a row of their own."""
        row = self.take(slice(0, 1))
        return replace(row, kv_len=row.kv_len * 0 + blocks * block_size, num_blocks=row.num_blocks * 0 + blocks)

    def after(self, blocks: int) -> RowSet:
        """The same rows without their first ``blocks`` blocks of context."""
        return replace(self, first_block=self.first_block + blocks, num_blocks=self.num_blocks - blocks)

    def positions(self, begin: int, end: int, block_size: int) -> np.ndarray:
        """[rows, end - begin]: where queries ``begin … end - 1`` of each row are, counted from the row's ``first_block``.

        A row with fewer queries repeats its last one.
        """
        first = self.kv_len - self.query_len - self.first_block * block_size
        return first[:, None] + np.minimum(np.arange(begin, end), self.query_len[:, None] - 1)

    def __len__(self) -> int:
        return len(self.index)


def sections(rows: RowSet) -> list[RowSet]:
    """Rows by query length: equal lengths, or short ones of one class. Batch order within a section."""
    short = np.searchsorted(QUERY_CLASSES, rows.query_len)
    key = np.where(rows.query_len <= QUERY_CLASSES[-1], QUERY_CLASSES[np.minimum(short, len(QUERY_CLASSES) - 1)], rows.query_len)
    if not len(key) or (key == key[0]).all():
        return [rows] if len(key) else []
    return [rows.take(key == value) for value in np.unique(key)]


def tile_width(num_rows: int, query_len: int, keys: int, shape: Shape) -> int:
    """Queries per tile when ``num_rows`` rows attend to ``keys`` keys each."""
    if query_len <= MIN_TILE:
        return query_len
    fitting = TILE_SCORES // (num_rows * shape.num_heads * keys)
    width = min(max(fitting, MIN_TILE), MAX_TILE)
    return min(query_len, 1 << (width.bit_length() - 1))


def groups(rows: RowSet, shape: Shape) -> list[RowSet]:
    """Cut a section into groups. Concatenated, they are the section sorted by context length (or in batch order, if one)."""
    query_len = int(rows.query_len.max())
    blocks = rows.num_blocks
    per_token = 2 * shape.num_kv_heads * shape.head_size + shape.num_heads * min(query_len, MAX_TILE)
    per_block = shape.block_size * shape.itemsize * per_token
    limit = max(GROUP_BYTES // per_block, 1)
    widest = int(blocks.max())
    if len(rows) * widest <= limit and len(rows) * widest - int(blocks.sum()) <= PADDING_BLOCKS:
        return [rows]
    order = np.argsort(blocks, kind="stable")
    return [rows.take(part) for part in np.split(order, _cuts(blocks[order], limit))]


def shared_sets(section: RowSet, block_table: np.ndarray, shape: Shape) -> tuple[list[tuple[RowSet, int]], RowSet | None]:
    """Rows of a section that begin with the same blocks, each set with its number of common blocks; and the other rows.

    Only blocks before every new token of the set count, so that nothing in them is hidden from anybody.
    """
    if shape.sliding_window is not None or len(section) < 2 or int(section.query_len.max()) > SHARED_QUERIES:
        return [], section
    table = block_table[section.index]
    past = (section.kv_len - section.query_len) // shape.block_size
    found: list[tuple[RowSet, int]] = []
    alone = np.ones(len(section), bool)
    first, count = np.unique(table[:, 0], return_counts=True)
    for block in first[count > 1]:
        members = np.flatnonzero(table[:, 0] == block)
        longest = int(past[members].min())
        same = (table[members, :longest] == table[members[0], :longest]).all(axis=0)
        common = (longest if same.all() else int(same.argmin())) // shape.block_unit * shape.block_unit
        if (len(members) - 1) * common >= SHARED_BLOCKS:
            found.append((section.take(members), common))
            alone[members] = False
    return found, section.take(alone) if alone.any() else None


def _cuts(blocks: np.ndarray, limit: int) -> list[int]:
    """Where to cut rows with ascending block counts: no group above ``limit`` blocks, little padding."""
    cuts: list[int] = []
    begin = used = 0
    for position, count in enumerate(blocks.tolist()):
        size = position - begin + 1
        if size > 1 and (size * count > limit or size * count - used - count > PADDING_BLOCKS):
            cuts.append(position)
            begin, used = position, 0
        used += count
    return cuts


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above ``value``."""
    return -(-value // multiple) * multiple
