"""Which rows are computed together: host arithmetic only, no tensors.

Rows with the same number of new tokens form a *section* (a decode row has one new token); short prompts of nearly equal
length are padded to the longest of them. A section is cut into *groups* of rows with nearly equal context, small enough
that a group's keys, values and scores stay in a core's cache.
"""

from __future__ import annotations

import numpy as np

from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.shape import Shape

QUERY_CLASSES = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128])
"""Upper ends of the query lengths that are padded to a common length; longer ones share a section only when equal."""


def sections(rows: RowSet) -> list[RowSet]:
    """Rows by query length: equal lengths, or short ones of one class. Batch order within a section."""
    short = np.searchsorted(QUERY_CLASSES, rows.query_len)
    key = np.where(rows.query_len <= QUERY_CLASSES[-1], QUERY_CLASSES[np.minimum(short, len(QUERY_CLASSES) - 1)], rows.query_len)
    if not len(key) or (key == key[0]).all():
        return [rows] if len(key) else []
    return [rows.take(key == value) for value in np.unique(key)]


def tile_width(num_rows: int, query_len: int, keys: int, shape: Shape) -> int:
    """Queries per tile when ``num_rows`` rows attend to ``keys`` keys each."""
    limits = shape.limits
    if query_len <= limits.min_tile:
        return query_len
    fitting = limits.tile_scores // (num_rows * shape.num_heads * keys)
    width = min(max(fitting, limits.min_tile), limits.max_tile)
    return min(query_len, 1 << (width.bit_length() - 1))


def groups(rows: RowSet, shape: Shape) -> list[RowSet]:
    """Cut a section into groups. Concatenated, they are the section sorted by context length (or in batch order, if one)."""
    query_len = int(rows.query_len.max())
    blocks = rows.num_blocks
    per_token = 2 * shape.num_kv_heads * shape.head_size + shape.num_heads * min(query_len, shape.limits.max_tile)
    per_block = shape.block_size * shape.itemsize * per_token
    limit = max(shape.limits.group_bytes // per_block, 1)
    padding, widest = shape.limits.padding_blocks, int(blocks.max())
    if len(rows) * widest <= limit and len(rows) * widest - int(blocks.sum()) <= padding:
        return [rows]
    order = np.argsort(blocks, kind="stable")
    return [rows.take(part) for part in np.split(order, _cuts(blocks[order], limit, padding))]


def shared_sets(section: RowSet, block_table: np.ndarray, shape: Shape) -> tuple[list[tuple[RowSet, int]], RowSet | None]:
    """Rows of a section that begin with the same blocks, each set with its number of common blocks; and the other rows.

    Only blocks before every new token of the set count, so that nothing in them is hidden from anybody. Not for layers with a
    sliding window or ALiBi: there a key is not the same to all rows.
    """
    if len(section) < 2 or int(section.query_len.max()) > shape.limits.shared_queries:
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
        if (len(members) - 1) * common >= shape.limits.shared_blocks:
            found.append((section.take(members), common))
            alone[members] = False
    return found, section.take(alone) if alone.any() else None


def _cuts(blocks: np.ndarray, limit: int, padding: int) -> list[int]:
    """Where to cut rows with ascending block counts: no group above ``limit`` blocks nor with more than ``padding`` to spare."""
    cuts: list[int] = []
    begin = used = 0
    for position, count in enumerate(blocks.tolist()):
        size = position - begin + 1
        if size > 1 and (size * count > limit or size * count - used - count > padding):
            cuts.append(position)
            begin, used = position, 0
        used += count
    return cuts
