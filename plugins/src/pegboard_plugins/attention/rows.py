"""Some rows of a step, as columns on the host."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np


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
    def of(cls, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_size: int, window: int | None = None) -> RowSet:
        """All rows that have tokens. ``window``: what no query of a row sees because of it is left out."""
        start = query_start_loc.astype(np.int64)
        query_len = np.diff(start)
        index = np.flatnonzero(query_len)
        query_len, kv_len = query_len[index], seq_lens[index].astype(np.int64)
        first_block = np.zeros_like(kv_len)
        if window is not None:
            first_block = np.maximum(kv_len - query_len - window + 1, 0) // block_size
        last_block = (kv_len + block_size - 1) // block_size
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
