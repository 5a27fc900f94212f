"""Which rows are computed together: host arithmetic only, no tensors.

Rows with the same number of new tokens form a *section* (a decode row has one new token); short prompts of nearly equal
length are padded to the longest of them. A section is cut into *groups* of rows with nearly equal context, small enough
that a group's keys, values and scores stay in a core's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

QUERY_CLASSES = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
"""Upper ends of the query lengths that are padded to a common length; longer ones share a section only when equal."""

GROUP_BYTES = 2 << 20
"""Keys, values and scores of one group. About what the second-level caches of two cores hold; measured in benchmarks/attention.py."""

PADDING_BLOCKS = 48
"""Blocks of padding that cost as much as the fixed cost of one more group."""

EXACT_KEYS = 320
"""Decode rows with so few keys in all are computed in float32: the product of small matrices costs less than its bfloat16 set-up."""

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

    def take(self, which: np.ndarray) -> RowSet:
        """Some of the rows, in the order given (positions or a mask)."""
        return RowSet(
            self.index[which],
            self.query_start[which],
            self.query_len[which],
            self.kv_len[which],
            self.first_block[which],
            self.num_blocks[which],
        )

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
    per_block = shape.block_size * shape.itemsize * (
        2 * shape.num_kv_heads * shape.head_size + shape.num_heads * min(query_len, MAX_TILE)
    )
    limit = max(GROUP_BYTES // per_block, 1)
    widest = int(blocks.max())
    if len(rows) * widest <= limit and len(rows) * widest - int(blocks.sum()) <= PADDING_BLOCKS:
        return [rows]
    order = np.argsort(blocks, kind="stable")
    return [rows.take(part) for part in np.split(order, _cuts(blocks[order], limit))]


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
