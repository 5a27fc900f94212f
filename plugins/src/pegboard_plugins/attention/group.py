"""One group of rows: gather its keys and values, then attend tile by tile. Every view is made once per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from .cache_layout import run_index
from .plan import RowSet, Shape, tile_width
from .workspace import Workspace

MASK_SIZE = 1 << 18
"""Numbers in the largest mask that is written out for every head of a group."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries ``a … b - 1`` of each row of a group against the keys that any of them sees."""

    query: torch.Tensor
    """[N * kv heads, (b - a) * group size, head size], already scaled."""
    key_t: torch.Tensor
    """[N * kv heads, head size, keys]."""
    value: torch.Tensor
    """[N * kv heads, keys, head size]."""
    scores: torch.Tensor
    """[N * kv heads, (b - a) * group size, keys]: workspace."""
    out: torch.Tensor
    """[N * kv heads, (b - a) * group size, head size]."""
    masked: torch.Tensor | None
    """The part of ``scores`` where something is hidden: [N, kv heads, …, columns]."""
    mask: torch.Tensor | None
    """0 or minus infinity, broadcast over ``masked``."""

    def run(self, soft_cap: float | None) -> None:
        scores = torch.bmm(self.query, self.key_t, out=self.scores)
        if soft_cap is not None:
            scores.tanh_().mul_(soft_cap)
        if self.masked is not None:
            self.masked.add_(self.mask)
        torch.softmax(scores, -1, out=scores)
        torch.bmm(scores, self.value, out=self.out)


class RowGroup:
    """Rows of one section that are gathered together."""

    def __init__(
        self, rows: RowSet, block_table: torch.Tensor, query: torch.Tensor, out: torch.Tensor, shape: Shape, workspace: Workspace,
        cache_dtype: torch.dtype,
    ) -> None:
        """``query`` and ``out`` are this group's part of the section's buffers: [N, kv heads, query len, group size, head size]."""
        self._device = block_table.device
        # Scores are softmaxed in whole vectors: a ragged end costs several times the columns that it spares.
        self._columns = max(64 // query.dtype.itemsize, 1)
        num_blocks = _round_up(int(rows.num_blocks.max()), self._columns // math.gcd(self._columns, shape.block_size))
        heads, width = shape.num_kv_heads, num_blocks * shape.block_size
        self._runs = run_index(self._blocks(rows, num_blocks, block_table), heads)
        gathered = workspace.view("gathered", query.dtype, 2, len(rows), heads, width, shape.head_size)
        self._wide = None if query.dtype == cache_dtype else gathered.view(len(self._runs), -1)
        self._target = (
            gathered.view(len(self._runs), -1)
            if self._wide is None
            else workspace.view("narrow", cache_dtype, len(self._runs), shape.block_size * shape.head_size)
        )
        self._token_rows = gathered.view(-1, shape.head_size)
        self._stale = self._stale_rows(rows, num_blocks, shape)
        self._tiles = list(self._make_tiles(rows, gathered, query, out, shape, workspace))

    def run(self, runs: torch.Tensor, soft_cap: float | None) -> None:
        """Attend. ``runs``: the layer's cache as [runs, block_size * head_size]."""
        torch.index_select(runs, 0, self._runs, out=self._target)
        if self._wide is not None:
            self._wide.copy_(self._target)
        if self._stale is not None:
            self._token_rows.index_fill_(0, self._stale, 0.0)
        for tile in self._tiles:
            tile.run(soft_cap)

    def _blocks(self, rows: RowSet, num_blocks: int, block_table: torch.Tensor) -> torch.Tensor:
        """[N, num_blocks] int64 block ids. Rows with fewer blocks repeat their first one, never somebody else's."""
        offset = np.arange(num_blocks)
        column = rows.first_block[:, None] + np.where(offset < rows.num_blocks[:, None], offset, 0)
        table = block_table.index_select(0, self._to_device(rows.index)).long()
        return table.gather(1, self._to_device(column))

    def _stale_rows(self, rows: RowSet, num_blocks: int, shape: Shape) -> torch.Tensor | None:
        """Gathered rows that hold no token of their row, and may hold anything: they are zeroed so that 0 * NaN cannot spread.

        Only the tail of a row's last block is such a place, but a row's only block is also what pads it.
        """
        kept = rows.kv_len - rows.first_block * shape.block_size
        used = _round_up(int(kept.max()), self._columns)
        if (kept == used).all():
            return None
        slot = np.arange(used)
        position = np.where(slot < (rows.num_blocks * shape.block_size)[:, None], slot, slot % shape.block_size)
        row, slot = np.nonzero(position >= kept[:, None])
        width = num_blocks * shape.block_size
        heads = np.arange(shape.num_kv_heads)[:, None]
        values = ((np.arange(2)[:, None, None] * len(rows) + row) * shape.num_kv_heads + heads) * width + slot
        return self._to_device(values.ravel()) if values.size else None

    def _make_tiles(self, rows, gathered, query, out, shape, workspace):  # type: ignore[no-untyped-def]
        size, heads, query_len, group, head_size = query.shape
        origin = rows.first_block * shape.block_size
        first = rows.kv_len - rows.query_len - origin
        step = tile_width(size, query_len, gathered.shape[3], shape)
        key, value = gathered.view(2, size * heads, -1, head_size).unbind(0)
        query = query.view(size * heads, query_len * group, head_size)
        out = out.view(size * heads, query_len * group, head_size)
        for a in range(0, query_len, step):
            b = min(a + step, query_len)
            # Padded queries repeat the row's last one.
            at = first[:, None] + np.minimum(np.arange(a, b), rows.query_len[:, None] - 1)
            high = _round_up(int(at.max()) + 1, self._columns)
            low = 0 if shape.sliding_window is None else max(int(at.min()) - shape.sliding_window + 1, 0)
            low -= low % self._columns
            scores = workspace.view("scores", query.dtype, size * heads, (b - a) * group, high - low)
            begin, mask = self._mask(at, low, high, group, shape.sliding_window, query.dtype)
            yield Tile(
                query=query[:, a * group : b * group],
                key_t=key[:, low:high].transpose(1, 2),
                value=value[:, low:high],
                scores=scores,
                out=out[:, a * group : b * group],
                masked=None if mask is None else scores.view(size, heads, *mask.shape[2:-1], high - low)[..., begin - low :],
                mask=mask,
            )

    def _mask(
        self, at: np.ndarray, low: int, high: int, group: int, window: int | None, dtype: torch.dtype
    ) -> tuple[int, torch.Tensor | None]:
        """First column where something is hidden and the mask from there, for queries at positions ``at`` [N, queries].

        The mask is [N, 1, queries, 1, columns], or with the group written out [N, 1, queries * group, columns] if that is small:
        fewer dimensions are added faster.
        """
        outside_window = window is not None and int(at.max()) - window >= low
        begin = low if outside_window else (int(at.min()) + 1) // self._columns * self._columns
        if begin >= high:
            return high, None
        key = np.arange(begin, high)
        hidden = key > at[:, :, None]
        if window is not None:
            hidden |= key <= at[:, :, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
        mask.masked_fill_(self._to_device(hidden), float("-inf"))
        if mask.numel() * group > MASK_SIZE:
            return begin, mask.unsqueeze(2).unsqueeze(1)
        return begin, mask.repeat_interleave(group, 1).unsqueeze(1)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
