"""One group of rows: gather its keys and values, then attend tile by tile. Every view is made once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard_plugins.attention.constants import Constants, SinkColumns
from pegboard_plugins.attention.context import StepContext
from pegboard_plugins.attention.distances import Distances
from pegboard_plugins.attention.gather import Gather
from pegboard_plugins.attention.mask import causal_mask
from pegboard_plugins.attention.plan import tile_width
from pegboard_plugins.attention.rows import RowSet
from pegboard_plugins.attention.shape import round_up


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
    whole: torch.Tensor
    """``scores`` and the columns of sinks, which are behind them."""
    out: torch.Tensor
    """[N * kv heads, (b - a) * group size, head size]."""
    distances: Distances | None
    masked: torch.Tensor | None
    """The part of ``scores`` where something is hidden."""
    mask: torch.Tensor | None
    """What is added to it."""
    sinks: SinkColumns | None

    def run(self, constants: Constants) -> None:
        scores = torch.bmm(self.query, self.key_t, out=self.scores)
        if constants.soft_cap is not None:
            scores.tanh_().mul_(constants.soft_cap)
        if self.distances is not None:
            assert constants.slopes is not None, "planned for layers with ALiBi"
            self.distances.add(constants.slopes)
        if self.masked is not None:
            self.masked.add_(self.mask)
        if self.sinks is not None:
            assert constants.sinks is not None, "planned for layers with sinks"
            self.sinks.put(constants.sinks)
        torch.softmax(self.whole, -1, out=self.whole)
        torch.bmm(scores, self.value, out=self.out)


class RowGroup:
    """Rows of one section that are gathered together."""

    def __init__(self, rows: RowSet, query: torch.Tensor, out: torch.Tensor, context: StepContext) -> None:
        """``query``, ``out``: this group's part of the section's buffers, [N, kv heads, query len, group size, head size]."""
        self._gather = Gather(rows, context)
        step = tile_width(len(rows), query.shape[2], self._gather.width, context.shape)
        self._tiles = [
            self._tile(rows, begin, min(begin + step, query.shape[2]), query, out, context)
            for begin in range(0, query.shape[2], step)
        ]

    def run(self, runs: torch.Tensor, constants: Constants) -> None:
        """Attend. ``runs``: the layer's cache as [runs, block_size * head_size]."""
        self._gather.run(runs)
        for tile in self._tiles:
            tile.run(constants)

    def _tile(self, rows: RowSet, begin: int, end: int, query: torch.Tensor, out: torch.Tensor, context: StepContext) -> Tile:
        shape, window = context.shape, context.features.sliding_window
        batch, group = len(rows) * shape.num_kv_heads, shape.group
        positions = rows.positions(begin, end, shape.block_size)
        high = round_up(int(positions.max()) + 1, shape.columns)
        low = 0 if window is None else max(int(positions.min()) - window + 1, 0) // shape.columns * shape.columns
        mask = causal_mask(positions, low, high, context)
        whole = context.buffer("scores", batch, (end - begin) * group, high - low + context.sink_columns)
        scores = whole[..., : high - low]
        by_head = whole.view(len(rows), shape.num_kv_heads, end - begin, group, -1)
        return Tile(
            query=query.flatten(0, 1).flatten(1, 2)[:, begin * group : end * group],
            key_t=self._gather.key[:, low:high].transpose(1, 2),
            value=self._gather.value[:, low:high],
            scores=scores,
            whole=whole,
            out=out.flatten(0, 1).flatten(1, 2)[:, begin * group : end * group],
            distances=Distances(by_head[..., : high - low], positions, low, context) if context.features.alibi else None,
            masked=None if mask is None else mask.part_of(scores),
            mask=None if mask is None else mask.addend(),
            sinks=SinkColumns(by_head[..., high - low :]) if context.sink_columns else None,
        )
