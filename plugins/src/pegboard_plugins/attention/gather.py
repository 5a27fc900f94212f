"""Copy the keys and values of some rows out of the paged cache, sorted by row and head."""

from __future__ import annotations

import numpy as np
import torch

from pegboard_plugins.attention.cache_layout import run_index
from pegboard_plugins.attention.context import StepContext
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.shape import Shape, round_up
from pegboard_plugins.attention.stored import movable, widen


class Gather:
    """``key`` and ``value`` are ``[N * kv heads, width, head size]``, filled by ``run`` from a layer's cache.

    ``width`` counts tokens from each row's ``first_block``, in multiples of ``shape.columns``. Where a row has no token, there
    is a finite number. With ``by_head`` the first dimension is sorted by head, then by row; otherwise by row, then by head.
    """

    def __init__(self, rows: RowSet, context: StepContext, *, by_head: bool = False, buffer: str = "gathered") -> None:
        shape = context.shape
        num_blocks = round_up(int(rows.num_blocks.max()), shape.block_unit)
        self.width = num_blocks * shape.block_size
        gathered = context.buffer(buffer, 2, len(rows) * shape.num_kv_heads, self.width, shape.head_size)
        self.key, self.value = gathered.unbind(0)
        self._index = run_index(_block_ids(rows, num_blocks, context.block_table), shape.num_kv_heads, by_head=by_head)
        runs = (len(self._index), shape.block_size * shape.head_size)
        self._stored, self._wide = gathered.view(runs), None
        if context.dtype != context.cache_dtype:
            self._stored, self._wide = context.workspace.view("stored", context.cache_dtype, *runs), gathered.view(runs)
        self._target = movable(self._stored)
        self._token_rows = gathered.view(-1, shape.head_size)
        stale = _stale_rows(rows, self.width, shape, by_head)
        self._stale = torch.from_numpy(stale).to(context.device) if stale.size else None

    def run(self, runs: torch.Tensor) -> None:
        """``runs``: the layer's cache as [runs, block_size * head_size], movable."""
        torch.index_select(runs, 0, self._index, out=self._target)
        if self._wide is not None:
            widen(self._stored, self._wide)
        if self._stale is not None:
            self._token_rows.index_fill_(0, self._stale, 0.0)


def _block_ids(rows: RowSet, num_blocks: int, block_table: torch.Tensor) -> torch.Tensor:
    """[N, num_blocks] int64. Rows with fewer blocks repeat their first one, never somebody else's."""
    offset = np.arange(num_blocks)
    column = rows.first_block[:, None] + np.where(offset < rows.num_blocks[:, None], offset, 0)
    if block_table.device.type == "cpu":
        return torch.from_numpy(block_table.numpy()[rows.index[:, None], column].astype(np.int64))
    device = block_table.device
    table = block_table.index_select(0, torch.from_numpy(rows.index).to(device)).long()
    return table.gather(1, torch.from_numpy(column).to(device))


def _stale_rows(rows: RowSet, width: int, shape: Shape, by_head: bool) -> np.ndarray:
    """Gathered token rows that hold no token of their row, and may hold anything. They are zeroed: 0 * NaN would spread.

    That is the end of a row's last block, and of its copies where the only block also serves as padding.
    """
    kept = rows.kv_len - rows.first_block * shape.block_size
    if (kept == width).all():
        return np.empty(0, np.int64)
    if width > shape.block_size and (rows.num_blocks == 1).any():
        slots = np.broadcast_to(np.arange(width), (len(rows), width))
        source = np.where(slots < (rows.num_blocks * shape.block_size)[:, None], slots, slots % shape.block_size)
    else:
        slots = source = ((rows.num_blocks - 1) * shape.block_size)[:, None] + np.arange(shape.block_size)
    row, column = np.nonzero(source >= kept[:, None])
    slot = slots[row, column]
    head = np.arange(shape.num_kv_heads)[:, None]
    batch = head * len(rows) + row if by_head else row * shape.num_kv_heads + head
    values = len(rows) * shape.num_kv_heads * width
    return (np.array([0, values])[:, None, None] + batch * width + slot).ravel()
